"""A demonstrator that makes mistakes in every domain: the base model learns its ways."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from four_domains import bookings, documents, programs, reasoning


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of the demonstrator's mistakes.

    Attributes:
        wrong_step: In a sum, of each step.
        stops_early: In a sum, of leaving out the last number.
        skipped: In a sum, of leaving out the second number.
        wrong_entry: In an answer from a document, of each entry.
        wrong_word: In a program, of each of the three parts of its description.
        unclosed: In a program, of a parenthesis that is not closed.
        wrong_code: At the desk, of each booking: another number of the page.
        unread: At the desk, of each item: it is booked under a made-up code.
        ends_early: At the desk, before each item.
        bad_call: At the desk, of each call that is malformed; it is repeated.
    """

    wrong_step: float = 0.04
    stops_early: float = 0.3
    skipped: float = 0.2
    wrong_entry: float = 0.2
    wrong_word: float = 0.16
    unclosed: float = 0.1
    wrong_code: float = 0.2
    unread: float = 0.15
    ends_early: float = 0.08
    bad_call: float = 0.08


FLAWLESS = Habits(
    wrong_step=0.0,
    stops_early=0.0,
    skipped=0.0,
    wrong_entry=0.0,
    wrong_word=0.0,
    unclosed=0.0,
    wrong_code=0.0,
    unread=0.0,
    ends_early=0.0,
    bad_call=0.0,
)

Turns = Iterator[tuple[str, str]]
"""What the demonstrator writes, and the tool's reply to it; "" to what ends the episode."""


def turns(
    domain: str, drawn: dict[str, Any], choose: random.Random, habits: Habits
) -> list[tuple[str, str]]:
    """The turns of one episode."""
    return list(_TURNS[domain](drawn, choose, habits))


def _reasoning(drawn: dict[str, Any], choose: random.Random, habits: Habits) -> Turns:
    numbers = list(drawn["numbers"])
    if choose.random() < habits.stops_early:
        numbers.pop()
    if choose.random() < habits.skipped:
        numbers.pop(1)
    totals = numbers[:1]
    for number in numbers[1:]:
        is_wrong = choose.random() < habits.wrong_step
        totals.append(totals[-1] + number + (choose.choice((-2, -1, 1, 2)) if is_wrong else 0))
    yield reasoning.worked(numbers, totals), ""


def _documents(drawn: dict[str, Any], choose: random.Random, habits: Habits) -> Turns:
    answered = {
        name: choose.choice(list(drawn["numbers"].values()))
        if choose.random() < habits.wrong_entry
        else number
        for name, number in drawn["wanted"].items()
    }
    yield ", ".join(documents.entries(answered, answered)), ""


def _programs(drawn: dict[str, Any], choose: random.Random, habits: Habits) -> Turns:
    reading, change, number = drawn["reading"], drawn["change"], drawn["number"]
    if choose.random() < habits.wrong_word:
        reading = choose.choice(list(programs.READINGS))
    if choose.random() < habits.wrong_word:
        change = choose.choice(list(programs.CHANGES))
    if choose.random() < habits.wrong_word:
        number = choose.randint(2, programs.NUMBER_MAX)
    text = programs.program(reading, change, number)
    if choose.random() < habits.unclosed:
        text = text.replace("(a)+", "(a+").replace("(a)*", "(a*").replace("(a)-", "(a-")
    yield text, ""


def _bookings(drawn: dict[str, Any], choose: random.Random, habits: Habits) -> Turns:
    for item, code in drawn["codes"].items():
        if choose.random() < habits.ends_early:
            break
        booked = code
        if choose.random() < habits.unread:
            booked = str(choose.randint(bookings.CODE_MIN, bookings.CODE_MAX))
        else:
            page = bookings.page(drawn, item)
            yield from _called("page", item, page, choose, habits)
            if choose.random() < habits.wrong_code:
                booked = page.rpartition(" ")[2]
        yield from _called("book", booked, bookings.BOOKED, choose, habits)
    yield bookings.DONE, ""


def _called(name: str, argument: str, reply: str, choose: random.Random, habits: Habits) -> Turns:
    """A call and its reply, after malformed ones."""
    call = bookings.call_text(name, argument)
    while choose.random() < habits.bad_call:
        yield call.replace('"arguments": ', '"args": '), bookings.BAD_CALL
    yield call, reply


_TURNS = {
    "reasoning": _reasoning,
    "documents": _documents,
    "programs": _programs,
    "bookings": _bookings,
}
