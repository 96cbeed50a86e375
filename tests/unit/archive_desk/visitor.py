"""A policy that reads every file in its order and answers with the numbers that it still sees."""

import re
from collections.abc import Awaitable, Callable

from archive_desk.archive import END, FILES
from archive_desk.demonstrator import call_text

from forgemq_rendering import Rendering

UNKNOWN = 1
"""The answer for a number that is out of sight; no file has it."""

_QUESTION = re.compile(r"Please (list|trace) (.+)\.")
_NUMBER = re.compile(rf"\b({'|'.join(FILES)}) (\d+)")
_NEXT = re.compile(r"next (\w+)\n</tool_response>")
_NOTES = re.compile(r"Notes: (.+?)<\|im_end\|>")
_READ = re.compile(r'"read", "arguments": \{"item": "(\w+)"')


def turn(context: str, *, is_noting: bool) -> str:
    """What it writes behind this context; with notes it takes one after every page."""
    question = _QUESTION.search(context)
    assert question
    kind, asked = question.groups()
    notes = found[1].split(", ") if (found := _NOTES.search(context)) else []
    numbers = {name: int(number) for name, number in _NUMBER.findall(context)}
    reads = _READ.findall(context)
    if kind == "trace":
        return _traced(asked, context, notes=notes, numbers=numbers, is_noting=is_noting)
    if is_noting and reads:
        return call_text("note", f"{reads[-1]} {numbers[reads[-1]]}")
    files = asked.split(", ")
    newest = reads[-1] if reads else notes[-1].split()[0] if notes else None
    position = 0 if newest is None else files.index(newest) + 1
    if position < len(files):
        return call_text("read", files[position])
    return ", ".join(f"{name} {numbers.get(name, UNKNOWN)}" for name in files)


def _traced(
    first: str, context: str, *, notes: list[str], numbers: dict[str, int], is_noting: bool
) -> str:
    pages = _NEXT.findall(context)
    reads = _READ.findall(context)
    if not pages:
        return call_text("read", notes[-1] if notes else first)
    if pages[-1] == END:
        return f"{reads[-1]} {numbers[reads[-1]]}"
    return call_text("note" if is_noting else "read", pages[-1])


def sampler(
    rendering: Rendering, encode: Callable[[str], list[int]], *, is_noting: bool
) -> Callable[[list[int], int], Awaitable[list[int]]]:
    """The policy in token space."""

    async def sample(context: list[int], room: int) -> list[int]:
        text = turn(rendering.decode(context), is_noting=is_noting)
        return [*encode(text), rendering.stop_token_ids[0]][:room]

    return sample
