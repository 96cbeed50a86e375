"""Gives a restored core the records that its snapshot names instead of containing them.

The span of a partition from the first of these records to the last is read once, and only their
own values are fetched from the blob store.
"""

from collections.abc import Mapping, Sequence

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.kept_records import message_of
from forgemq_bus.log import LogReads, Place, Record
from forgemq_contracts.journal import JournalledBatch, JournalPosition
from forgemq_contracts.messages import Core, RecallingCore, References
from forgemq_shell.journal import JournalError, check_kept

_RECORDS_MAX = 16
"""Values in memory at once beside those that the core holds; a batch holds as many bytes."""


def oldest_named(core: Core) -> tuple[JournalPosition, ...]:
    """The oldest record of each partition that a snapshot of this core names."""
    if not isinstance(core, RecallingCore):
        return ()
    return tuple(
        JournalPosition(topic=named.topic, partition=named.partition, position=min(named.offsets))
        for named in core.references()
        if named.offsets
    )


def positions_needed(batch: JournalledBatch) -> dict[Place, int]:
    """From where a task that begins with this snapshot reads each partition."""
    return {Place(at.topic, at.partition): at.position for at in (*batch.positions, *batch.needed)}


async def recall(core: Core, log: LogReads) -> Sequence[Record]:
    """Give a core what the snapshot names that it was restored from.

    Returns:
        The records whose values are lost; the core does not get those.

    Raises:
        JournalError: a record is not on the log any more.
    """
    lost: list[Record] = []
    if isinstance(core, RecallingCore):
        for named in core.references():
            if named.offsets:
                lost += await _recall(core, log, named)
    return lost


async def _recall(core: RecallingCore, log: LogReads, named: References) -> Sequence[Record]:
    place, left = Place(named.topic, named.partition), set(named.offsets)
    start, end = min(left), max(left) + 1
    check_kept({place: start}, await log.first_positions([place]))
    lost: list[Record] = []
    reader = await log.reader({place: start}, has_values=False)
    try:
        async for records in read_up_to(reader, {place: end}):
            found = [record for record in records if record.offset in left]
            left -= {record.offset for record in found}
            for first in range(0, len(found), _RECORDS_MAX):
                for record in await log.values(found[first : first + _RECORDS_MAX]):
                    if record.lost:
                        lost.append(record)
                    else:
                        core.recall(message_of(record))
    finally:
        await reader.close()
    if left:
        raise JournalError(f"{place}: record {min(left)} is missing")
    return lost


def recalled_starts(batches: Sequence[JournalledBatch]) -> Mapping[Place, int]:
    """The oldest record of each partition that a snapshot among these batches names."""
    starts: dict[Place, int] = {}
    for at in (at for batch in batches for at in batch.needed):
        place = Place(at.topic, at.partition)
        starts[place] = min(at.position, starts.get(place, at.position))
    return starts
