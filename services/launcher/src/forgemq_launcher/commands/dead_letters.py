"""`forgemq dlq`: lists the records of a run that did not decode."""

from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

from forgemq_bus.kept_records import read_from
from forgemq_bus.log import Log, Record
from forgemq_bus.partitions import dead_letters_of
from forgemq_bus.payloads import BLOB_HEADERS, reference_of
from forgemq_contracts.topics import OF_RUN, Topic
from forgemq_launcher import exit_status
from forgemq_launcher.commands.run_on_broker import run_to_read
from forgemq_launcher.display.lines import say, say_json, show
from forgemq_launcher.run_folder import RunFolder
from forgemq_shell.batch import BATCH_HEADER
from forgemq_shell.dead_letters import letter_of

LETTER_BYTES_SHOWN_MAX = 60
"""Enough to tell JSON from msgpack and to see the first ids; a row of the table stays readable."""
LETTERS_SHOWN_MAX = 100
"""Of each topic, the newest. A writer of another version makes very many, all with one reason."""

_TOPICS = tuple(topic for topic in OF_RUN if topic.has_dlq)
_Cells: TypeAlias = tuple[str, str, str]


async def dlq(
    folder: RunFolder, environ: Mapping[str, str], console: Console, *, as_lines: bool = False
) -> int:
    """Print the newest dead letters of each topic with their reasons; 1 if there are any.

    Of one whose bytes lie in the blob store the address is shown. `as_lines` prints every letter
    whole instead, one as JSON in each line.
    """
    printing = print_letter_lines if as_lines else print_letters
    async with run_to_read(folder, environ) as (log, _):
        count = await printing(log, console)
    return exit_status.FAILED if count else exit_status.OK


async def print_letters(log: Log, console: Console) -> int:
    """Print a table of the newest dead letters; returns how many there are in all."""
    shown = Table("topic", "source", "reason", "first bytes")
    left_out: list[str] = []
    total = 0
    for topic in _TOPICS:
        count, newest = 0, deque[_Cells](maxlen=LETTERS_SHOWN_MAX)
        async for records in _letters(log, topic):
            count += len(records)
            newest.extend(_letter_cells(record, topic=topic) for record in records)
        for cells in newest:
            shown.add_row(topic.name, *cells)
        total += count
        if count > len(newest):
            left_out.append(
                f"of {topic.name} the newest {len(newest):,} of {count:,} are listed; "
                "--json prints all"
            )
    show(console, shown if total else "no dead letters")
    for line in left_out:
        say(console, line)
    return total


async def print_letter_lines(log: Log, console: Console) -> int:
    """Print every dead letter as a line of JSON; returns how many there are.

    `value` has the bytes as Base64. If they lie in the blob store it is empty, and `blob` has
    their address.
    """
    total = 0
    for topic in _TOPICS:
        async for records in _letters(log, topic):
            total += len(records)
            for record in records:
                reference = reference_of(record)
                whole = {
                    **msgspec.structs.asdict(letter_of(record)),
                    "producer": topic.producer,
                    "blob": reference.uri if reference else "",
                    "value": record.value,
                }
                say_json(console, whole)
    return total


async def _letters(log: Log, topic: Topic) -> AsyncIterator[list[Record]]:
    first = await log.first_positions([dead_letters_of(topic)])
    # Their values may lie in the blob store, and their beginning is not worth that.
    async for records in read_from(log, first, has_values=False):
        yield records


def _letter_cells(record: Record, *, topic: Topic) -> _Cells:
    """Where a dead letter comes from, why it is one, and how it begins."""
    # The batch that wrote the letter is no property of the bad record, which may have one, too.
    own = f"{topic.dead_letters_by}-".encode()
    headers = {"producer": topic.producer} | {
        name: value.decode(errors="replace")
        for name, value in record.headers
        if not (name == BATCH_HEADER and value.startswith(own))
    }
    reason = headers.pop("reason", "")
    headers = {name: value for name, value in headers.items() if name not in BLOB_HEADERS}
    source = " ".join(f"{name}={value}" for name, value in headers.items())
    if reference := reference_of(record):
        return source, reason, reference.uri
    return source, reason, repr(record.value[:LETTER_BYTES_SHOWN_MAX])
