"""A sloppy demonstrator: the base model learns the task, and these mistakes, from its episodes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from shop_desk.calls import ARGUMENT, BAD_CALL, Call, add_up, call_markup, read_calls, reply_to
from shop_desk.environment import TURNS_MAX
from shop_desk.shop import ITEMS, Order

PAGES_THAT_FIT = 3  # into the context window of 372 tokens


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of mistakes."""

    bad_call: float = 0.12
    looks_up_several_at_once: float = 0.30
    notes_when_full: float = 0.40
    notes_needlessly: float = 0.10
    notes_wrong_price: float = 0.05
    guesses_price: float = 0.07
    wrong_count: float = 0.03
    answers_without_total: float = 0.55


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One context of an episode: the user's text, then turns and the replies to each."""

    question: str
    turns: tuple[tuple[str, tuple[str, ...]], ...]


def demonstrations(order: Order, choose: random.Random, habits: Habits) -> Iterator[Demonstration]:
    """The contexts of one demonstrated episode; each note starts another context."""
    notes: list[str] = []
    turns: list[tuple[str, tuple[str, ...]]] = []
    for count, text in enumerate(_turns(order, choose, habits), start=1):
        calls = read_calls(text)
        replies = tuple(BAD_CALL if c is None else reply_to(c, order) for c in calls)
        turns.append((text, replies))
        noted = [call.argument for call in calls if call is not None and call.name == "note"]
        is_last = not calls or count == TURNS_MAX
        if noted or is_last:
            yield Demonstration(question_text(order, notes), tuple(turns))
            notes, turns = notes + noted, []
        if is_last:
            return


def question_text(order: Order, notes: list[str]) -> str:
    """The user's message: the question, and the notes so far."""
    return order.question + (f"\nNotes: {', '.join(notes)}" if notes else "")


def call_text(name: str, argument: str) -> str:
    """A well-formed call of this tool, as the model writes it."""
    return call_markup(name, {ARGUMENT[name]: argument})


class _Demonstrator:
    """The demonstrator at work on one order: the prices it has seen, and its turns so far."""

    def __init__(self, order: Order, choose: random.Random, habits: Habits) -> None:
        self.order, self.choose, self.habits = order, choose, habits
        self.known: dict[str, int] = {}
        self.noted: set[str] = set()
        self.pages = 0
        self.pages_when_asked = -1
        self.to_do = [line.item for line in order.lines]

    def chance(self, probability: float) -> bool:
        return self.choose.random() < probability

    def perhaps_spoiled(self, call: str) -> str:
        return _spoiled(call, self.choose) if self.chance(self.habits.bad_call) else call

    def repeated(self, call: str) -> Iterator[str]:
        """Repeat the call until it is written without a mistake."""
        while (text := self.perhaps_spoiled(call)) != call:
            yield text
        yield call

    def note(self) -> Iterator[str]:
        """Perhaps note the prices on the pages; decided once for each number of pages."""
        new = [
            line.item
            for line in self.order.lines
            if line.item in self.known and line.item not in self.noted
        ]
        if not self.pages or not new or self.pages_when_asked == self.pages:
            return
        self.pages_when_asked = self.pages
        is_full = self.pages >= (PAGES_THAT_FIT if self.to_do else PAGES_THAT_FIT + 1)
        habits = self.habits
        if not self.chance(habits.notes_when_full if is_full else habits.notes_needlessly):
            return
        for item in new:
            if self.chance(habits.notes_wrong_price):
                self.known[item] = self.choose.randint(2, 99)
        yield from self.repeated(
            call_text("note", ", ".join(f"{item} {self.known[item]}" for item in new))
        )
        self.noted.update(new)
        self.pages, self.pages_when_asked = 0, -1

    def look_up(self) -> Iterator[str]:
        """Ask for the next prices, or make one up."""
        if self.chance(self.habits.guesses_price):
            self.known[self.to_do.pop(0)] = self.choose.randint(2, 99)
            return
        count = 1
        if len(self.to_do) > 1 and self.chance(self.habits.looks_up_several_at_once):
            count = self.choose.randint(2, len(self.to_do))
        text = "\n".join(
            self.perhaps_spoiled(call_text("price", item)) for item in self.to_do[:count]
        )
        yield text
        shown = [c.argument for c in read_calls(text) if isinstance(c, Call) and c.name == "price"]
        prices = self.order.prices
        self.pages += len(shown)
        self.known |= {item: prices[item] for item in shown}
        self.to_do = [item for item in self.to_do if item not in shown]

    def conclude(self) -> Iterator[str]:
        """Add up and answer, or answer with an invented total."""
        if self.chance(self.habits.answers_without_total):
            yield f"The total is {self.choose.randint(20, 999)}."
            return
        lines = []
        for line in self.order.lines:
            is_wrong = self.chance(self.habits.wrong_count)
            count = self.choose.randint(1, 9) if is_wrong else line.count
            lines.append(f"{count} {line.item} {self.known[line.item]}")
        text = ", ".join(lines)
        yield from self.repeated(call_text("total", text))
        yield f"The total is {add_up(text)}."


def _turns(order: Order, choose: random.Random, habits: Habits) -> Iterator[str]:
    worker = _Demonstrator(order, choose, habits)
    while True:
        yield from worker.note()
        if not worker.to_do:
            break
        yield from worker.look_up()
    yield from worker.conclude()


def _spoiled(call: str, choose: random.Random) -> str:
    """The call with one of five mistakes."""
    kind = choose.randrange(5)
    if kind == 0:
        return call.replace('"}}\n', '"}\n')
    if kind == 1:
        return call.replace('"arguments": ', '"args": ')
    if kind == 2:
        for right, wrong in (("price", "cost"), ("total", "sum"), ("note", "memo")):
            call = call.replace(f'"{right}"', f'"{wrong}"')
        return call
    if kind == 3:
        if '"price"' in call:
            return call.replace('"item": ', '"product": ')
        return call.replace('"lines": ', '"list": ').replace('"text": ', '"lines": ')
    return call.replace("\n</tool_call>", "")


def copy_drill(choose: random.Random, order: Order) -> tuple[str, str]:
    """(given, wanted): text in which prices or items must be copied from what is given."""
    prices = order.prices
    pages = [order.page(line.item) for line in order.lines]
    noted = ", ".join(f"{line.item} {prices[line.item]}" for line in order.lines)
    kind = choose.random()
    if kind < 0.45:
        items = choose.sample(ITEMS, choose.randint(4, 10))
        given = ", ".join(f"{item} {prices[item]}" for item in items)
        choose.shuffle(items)
        return given, "\n" + ", ".join(f"{item} {prices[item]}" for item in items)
    if kind < 0.67:
        return order.question, "\n".join(call_text("price", line.item) for line in order.lines)
    if choose.random() < 0.5:
        choose.shuffle(pages)
    given = order.question + "\n" + "\n".join(pages) + "\n"
    if kind < 0.78:
        return given, call_text("note", noted)
    if choose.random() < 0.3:
        given = f"{order.question}\nNotes: {noted}"
    lines = ", ".join(f"{line.count} {line.item} {prices[line.item]}" for line in order.lines)
    return given, call_text("total", lines)
