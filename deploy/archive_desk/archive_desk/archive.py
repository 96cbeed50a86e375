"""The archive: inquiries, files and their long pages. Pure; everything follows from the inquiry.

A visitor asks for numbers that are in 4 or 5 files. Every page is long, so that one of them fits
into the model's context window, and all of an inquiry are about three times as long as the window.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["collect", "trace"]
KINDS: tuple[Kind, ...] = ("collect", "collect", "trace")
"""Two of three inquiries are for the numbers of all files, one for that at the end of a trail."""

_FILE_NAMES = (
    "lamp rope soap drum kite vase comb fork bell sock mug pen jar rug cup mop saw nut bolt "
    "hat bag belt book boot bowl cake card coat disk door fan flag"
)
FILES: tuple[str, ...] = tuple(_FILE_NAMES.split())
FILE_COUNTS = (4, 5)
NUMBER_MAX = 99
PAGE_ENTRIES = 48
"""Beside the file's own: about 200 tokens."""

_FILLERS = ("shelf", "code", "stock")
END = "end"
"""What the last page of a trail names as the next file."""


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What one visitor asks; `archive_seed` decides all numbers and pages.

    Attributes:
        kind: collect: the numbers of all files. trace: that of the last, given the first.
        files: In the order in which the visitor names them, or in which pages point to them.
    """

    kind: Kind
    files: tuple[str, ...]
    archive_seed: int

    @property
    def question(self) -> str:
        """The visitor's question."""
        if self.kind == "trace":
            return f"Please trace {self.files[0]}."
        return f"Please list {', '.join(self.files)}."

    @property
    def numbers(self) -> Mapping[str, int]:
        """The number of every file in this visitor's archive."""
        choose = random.Random(self.archive_seed)
        return {name: choose.randint(2, NUMBER_MAX) for name in FILES}

    @property
    def wanted(self) -> Mapping[str, int]:
        """The right answer: numbers by file."""
        asked = self.files if self.kind == "collect" else self.files[-1:]
        numbers = self.numbers
        return {name: numbers[name] for name in asked}

    def next_file(self, name: str) -> str:
        """The file to which a page points; on a trail `end` after the last."""
        if self.kind == "trace" and name in self.files:
            return (*self.files, END)[self.files.index(name) + 1]
        return random.Random(f"{self.archive_seed}/next/{name}").choice(FILES)

    def page(self, name: str) -> str:
        """The page of a file: its number among many others, and the next file."""
        choose = random.Random(f"{self.archive_seed}/{name}")
        entries = [
            f"{_FILLERS[index % len(_FILLERS)]} {choose.randint(2, NUMBER_MAX)}"
            for index in range(PAGE_ENTRIES)
        ]
        entries.insert(choose.randint(0, PAGE_ENTRIES), f"{name} {self.numbers[name]}")
        return f"{', '.join(entries)}, next {self.next_file(name)}"


def draw_inquiry(
    choose: random.Random, *, kind: Kind | None = None, file_count: int | None = None
) -> Inquiry:
    """An inquiry drawn from this generator; what is not given is drawn too."""
    drawn_kind: Kind = choose.choice(KINDS) if kind is None else kind
    count = file_count or choose.choice(FILE_COUNTS)
    return Inquiry(drawn_kind, tuple(choose.sample(FILES, count)), choose.getrandbits(48))


def as_task(inquiry: Inquiry) -> dict[str, Any]:
    """The inquiry as JSON."""
    return {
        "kind": inquiry.kind,
        "files": list(inquiry.files),
        "archive_seed": inquiry.archive_seed,
    }


def inquiry_of(task: Mapping[str, Any]) -> Inquiry:
    """The inquiry in a task."""
    return Inquiry(task["kind"], tuple(task["files"]), task["archive_seed"])
