"""A sloppy demonstrator at the command line: the base model learns its ways and its mistakes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from shop_desk.calls import add_up, call_markup
from shop_desk.demonstrator import Demonstration
from shop_desk.shop import Order

from command_line.desk import BAD_COMMAND

_WRONG_NAME = {"price": "cost", "total": "sum", "answer": "say"}


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of mistakes."""

    wrong_name: float = 0.06
    broken_call: float = 0.02
    looks_up_several_at_once: float = 0.30
    guesses_price: float = 0.06
    wrong_count: float = 0.03
    answers_without_total: float = 0.30


def demonstration(order: Order, choose: random.Random, habits: Habits) -> Demonstration:
    """One demonstrated episode; a broken call ends it, as in the scaffold's configuration."""
    turns: list[tuple[str, tuple[str, ...]]] = []
    for commands in _turns(order, choose, habits):
        text = "\n".join(call_text(command) for command in commands)
        if choose.random() < habits.broken_call:
            turns.append((text.replace('"}}', '"}'), ()))
            break
        is_last = commands[0].startswith("answer ")
        replies = () if is_last else tuple(reply_to(command, order) for command in commands)
        turns.append((text, replies))
    return Demonstration(order.question, tuple(turns))


def call_text(command: str) -> str:
    """A call of `bash`, as the model writes it."""
    return call_markup("bash", {"command": command})


def reply_to(command: str, order: Order) -> str:
    """What the scaffold shows of a command's output."""
    name, _, argument = command.partition(" ")
    if name == "price":
        return order.page(argument) if argument in order.prices else BAD_COMMAND
    total = add_up(argument) if name == "total" else None
    return BAD_COMMAND if total is None else f"answer {total}"


def _turns(order: Order, choose: random.Random, habits: Habits) -> Iterator[list[str]]:
    """The commands of each turn."""
    known: dict[str, int] = {}
    to_do = [line.item for line in order.lines]
    while to_do:
        if choose.random() < habits.guesses_price:
            known[to_do.pop(0)] = choose.randint(2, 99)
            continue
        count = 1
        if choose.random() < habits.looks_up_several_at_once:
            count = choose.randint(1, len(to_do))
        commands = [_perhaps_wrong(f"price {item}", choose, habits) for item in to_do[:count]]
        yield commands
        shown = [command[6:] for command in commands if command.startswith("price ")]
        known |= {item: order.prices[item] for item in shown}
        to_do = [item for item in to_do if item not in shown]
    if choose.random() < habits.answers_without_total:
        yield from _repeated(f"answer {choose.randint(20, 999)}", choose, habits)
        return
    lines = ", ".join(
        f"{choose.randint(1, 9) if choose.random() < habits.wrong_count else line.count} "
        f"{line.item} {known[line.item]}"
        for line in order.lines
    )
    yield from _repeated(f"total {lines}", choose, habits)
    yield from _repeated(f"answer {add_up(lines)}", choose, habits)


def _repeated(command: str, choose: random.Random, habits: Habits) -> Iterator[list[str]]:
    """Repeat the command until its name is right."""
    while (written := _perhaps_wrong(command, choose, habits)) != command:
        yield [written]
    yield [command]


def _perhaps_wrong(command: str, choose: random.Random, habits: Habits) -> str:
    if choose.random() >= habits.wrong_name:
        return command
    name, _, argument = command.partition(" ")
    return f"{_WRONG_NAME[name]} {argument}"
