"""The records that show one group: its turns, grades and score, however old it is."""

from forgemq_bus.kept_records import message_of, read_at, read_from
from forgemq_bus.log import Log, Place, Record
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.messages import Message
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import (
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    GRADED_EPISODES,
    REQUESTED_GROUPS,
    SCORED_GROUPS,
)
from forgemq_shell.records import group_in_header

SHOWN = (FINISHED_COMPLETIONS, FINISHED_EPISODES, GRADED_EPISODES, SCORED_GROUPS)


async def shown_records(log: Log, group_id: str, *, partitions: int) -> list[Message]:
    """What the log still has of the group in the topics `SHOWN`.

    A view of the run holds the places of its newest groups alone. So the partitions of the group
    are read whole, without the values in the blob store.

    Args:
        log: Of the run.
        group_id: Of the group; it need not be known.
        partitions: Of the topics of groups.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    partition = group_partition(group_id, partitions=partitions)
    first = await log.first_positions([Place(topic.name, partition) for topic in SHOWN])
    found: list[tuple[Place, int]] = []
    async for records in read_from(log, first, has_values=False):
        found += [(each.place, each.offset) for each in records if _group_of(each) == group_id]
    return [message_of(record) for record in await read_at(log, found)]


async def is_requested(log: Log, group_id: str, *, configuration: RunConfiguration) -> bool:
    """Whether a group of this id was ever asked for; its request stays on the log.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    first = await log.first_positions(partitions_of(REQUESTED_GROUPS, configuration))
    is_found = False
    async for records in read_from(log, first, has_values=False):
        is_found = is_found or any(_group_of(each) == group_id for each in records)
    return is_found


def _group_of(record: Record) -> str:
    return group_in_header(record) or record.key.decode(errors="replace")
