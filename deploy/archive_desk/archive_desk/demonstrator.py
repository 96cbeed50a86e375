"""A demonstrator that often forgets to take notes: the base model learns its ways."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from shop_desk.calls import call_markup

from archive_desk.archive import FILES, NUMBER_MAX, Inquiry

HEADING = "Notes: "
SEPARATOR = ", "


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of what the demonstrator does after a page.

    Attributes:
        notes: It takes a note if it has to go on to a further page.
        notes_at_the_end: It takes one although it could answer.
        notes_wrongly: Of its notes, those of something that is not on the page.
        gives_up: It answers before it has read everything.
    """

    notes: float = 0.7
    notes_at_the_end: float = 0.1
    notes_wrongly: float = 0.04
    gives_up: float = 0.03


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One context of an episode.

    Attributes:
        opening: The user's text: the question, and notes.
        turns: What the demonstrator writes, and the reply to it; "" to what ends the context.
        given: So many turns at the beginning are the context of the others, and are not learned.
    """

    opening: str
    turns: tuple[tuple[str, str], ...]
    given: int = 0


def call_text(name: str, argument: str) -> str:
    """A well-formed call of `read` or `note`, as the model writes it."""
    return call_markup(name, {{"read": "item", "note": "text"}[name]: argument})


def with_notes(inquiry: Inquiry, choose: random.Random, habits: Habits) -> Iterator[Demonstration]:
    """The contexts of one episode with the note tool; each note starts a further one."""
    notes: list[str] = []
    turns: list[tuple[str, str]] = []
    known: dict[str, int] = {}
    for position, name in enumerate(inquiry.files):
        is_last = position == len(inquiry.files) - 1
        turns.append((call_text("read", name), inquiry.page(name)))
        known[name] = inquiry.numbers[name]
        if choose.random() < (habits.notes_at_the_end if is_last else habits.notes):
            note = _note(inquiry, name, choose, habits)
            yield Demonstration(_opening(inquiry, notes), (*turns, (call_text("note", note), "")))
            notes, turns = [*notes, note], []
        if is_last or choose.random() < habits.gives_up:
            break
    answered = answer_text(inquiry, known, choose)
    yield Demonstration(_opening(inquiry, notes), (*turns, (answered, "")))


def in_window(inquiry: Inquiry, choose: random.Random, habits: Habits) -> Iterator[Demonstration]:
    """The contexts of one episode in which the newest page is all that is left of the others."""
    turns: list[tuple[str, str]] = []
    for position, name in enumerate(inquiry.files):
        is_last = position == len(inquiry.files) - 1
        turns = [*turns[-1:], (call_text("read", name), inquiry.page(name))]
        if position:
            yield Demonstration(
                inquiry.question, (turns[0], (turns[1][0], "")), given=int(position > 1)
            )
        if is_last or choose.random() < habits.gives_up:
            break
    numbers = {name: inquiry.numbers[name]}
    answered = answer_text(inquiry, numbers, choose)
    yield Demonstration(inquiry.question, (turns[-1], (answered, "")), given=1)


def answer_text(inquiry: Inquiry, known: dict[str, int], choose: random.Random) -> str:
    """The answer with the numbers that are known, others made up."""
    return ", ".join(
        f"{name} {known.get(name, choose.randint(2, NUMBER_MAX))}" for name in inquiry.wanted
    )


def _opening(inquiry: Inquiry, notes: list[str]) -> str:
    return inquiry.question + (f"\n{HEADING}{SEPARATOR.join(notes)}" if notes else "")


def _note(inquiry: Inquiry, name: str, choose: random.Random, habits: Habits) -> str:
    """What has to be known later: the number, or on a trail the next file."""
    is_wrong = choose.random() < habits.notes_wrongly
    if inquiry.kind == "trace" and name != inquiry.files[-1]:
        return choose.choice(FILES) if is_wrong else inquiry.next_file(name)
    number = choose.randint(2, NUMBER_MAX) if is_wrong else inquiry.numbers[name]
    return f"{name} {number}"
