"""Walks the parts of a reply as it grows: what begins, what is added to it, what ends."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from forgemq_gateway.core.requests import Call, Text, Thinking


class Step(NamedTuple):
    """One thing that happens to the part at `place`; `added`: what it grows by."""

    kind: Literal["begin", "grow", "end"]
    place: int
    part: Text | Thinking | Call
    added: str = ""


class PartCursor:
    """How far the parts of one reply are written."""

    def __init__(self) -> None:
        self._index = 0
        self._written: int | None = None

    @property
    def is_at_start(self) -> bool:
        """Whether nothing is written."""
        return self._index == 0 and self._written is None

    def steps(self, parts: Sequence[Text | Thinking | Call], *, is_whole: bool) -> Iterator[Step]:
        """From what is written to the end of these parts; the last one ends if they are whole."""
        while self._index < len(parts):
            index = self._index
            part = parts[index]
            text = part.arguments if isinstance(part, Call) else part.text
            if self._written is None:
                self._written = 0
                yield Step("begin", index, part)
            if len(text) > self._written:
                added, self._written = text[self._written :], len(text)
                yield Step("grow", index, part, added)
            if not is_whole and index == len(parts) - 1:
                return
            self._index, self._written = index + 1, None
            yield Step("end", index, part)
