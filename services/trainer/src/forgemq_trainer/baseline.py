"""Waits until the base model is evaluated, before the weights that follow it are published.

Engines load what is published, and the evaluation's episodes are played over many requests: one
that began on version 0 would end on version 1. So step 0 trains while they play, and version 1
waits for the last of them.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from forgemq_bus.bounded_reads import read_to_end
from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Place, Record
from forgemq_contracts import topics
from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_contracts.rounds import START_ROUND, start_round_groups
from forgemq_contracts.topics import ADMITTED_GROUPS, RETIRED_GROUPS
from forgemq_shell.service import Context

READ_TIMEOUT_S = 0.25
"""How long a read blocks, hence how late a request to stop is seen."""

RECORDS_MAX = 500
"""Records of one read, each under 1 KB."""


class _Round:
    """Groups of the base model's round, as the log has them."""

    def __init__(self) -> None:
        self.admitted: set[str] = set()
        self._retired: set[str] = set()  # of any round: the topics have no common order

    @property
    def over(self) -> int:
        """How many of its groups are retired."""
        return len(self.admitted & self._retired)

    def observe(self, records: Sequence[Record]) -> None:
        """Take in records of both topics; those read twice change nothing."""
        for record in records:
            try:
                group = decoded_record(record)
            except msgspec.ValidationError:
                continue
            if isinstance(group, RetiredGroup) and group.purpose == "eval":
                self._retired.add(group.group_id)
            elif isinstance(group, AdmittedGroup) and _is_of_the_round(group):
                self.admitted.add(group.group_id)


def _is_of_the_round(group: AdmittedGroup) -> bool:
    return group.purpose == "eval" and group.round_name.startswith(START_ROUND)


async def wait_for_baseline(context: Context) -> None:
    """Wait until every group of the base model's round is retired, or until the stop event.

    Returns at once if the run has no such round, or if nobody has begun it: it is begun before the
    first training group is asked for. Gives up when no group of it was admitted or has retired for
    as long as a claimed group may take, which is one deadline to be played and one to be scored.
    The report then says which versions played it.
    """
    wanted = start_round_groups(context.configuration)
    if not wanted:
        return
    played = _Round()
    starts = await context.log.first_positions(_places(context))
    async for records in read_to_end(context.log, starts):
        played.observe(records)
    if not played.admitted:
        return
    quiet_max_s = 2 * max(queue.group_deadline_s for queue in context.configuration.queues)
    loop = asyncio.get_running_loop()
    moved_s = loop.time()
    context.telemetry.event("waiting_for_baseline", groups=wanted)
    reader = await context.log.reader(starts)
    try:
        while played.over < wanted and not context.stop.is_set():
            before = len(played.admitted), played.over
            played.observe(await reader.read(timeout_s=READ_TIMEOUT_S, records_max=RECORDS_MAX))
            if (len(played.admitted), played.over) != before:
                moved_s = loop.time()
            elif loop.time() - moved_s > quiet_max_s:
                context.telemetry.event("baseline_given_up", groups=wanted, retired=played.over)
                return
    finally:
        await reader.close()


def _places(context: Context) -> list[Place]:
    return [
        Place(topic.name, number)
        for topic in (ADMITTED_GROUPS, RETIRED_GROUPS)
        for number in range(topics.partition_count(topic, context.configuration))
    ]
