"""Waits until the base model is evaluated, before the weights that follow it are published.

Engines load what is published, and the evaluation's episodes are played over many requests: one
that began on version 0 would end on version 1. So step 0 trains while they play, and version 1
waits for the last of them.
"""

import asyncio
import contextlib

import msgspec

from forgemq_bus.bounded_reads import read_to_end
from forgemq_bus.log import Place, Record
from forgemq_contracts import topics
from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_contracts.rounds import START_ROUND, start_round_groups
from forgemq_contracts.topics import ADMITTED_GROUPS, RETIRED_GROUPS, Topic
from forgemq_shell.service import Context

READ_TIMEOUT_S = 0.25
"""How long a read blocks, hence how late a request to stop is seen."""

RECORDS_MAX = 500
"""Records of one read, each under 1 KB."""


async def wait_for_baseline(context: Context) -> None:
    """Wait until every group of the base model's round is retired, or until the stop event.

    Returns at once if the run has no such round, or if nobody has begun it: it is begun before the
    first training group is asked for. Gives up when no group of it has retired for as long as any
    group may take; the report then says which versions played it.
    """
    wanted = start_round_groups(context.configuration)
    if not wanted or not await _has_begun(context):
        return
    quiet_max_s = max(queue.group_deadline_s for queue in context.configuration.queues)
    loop = asyncio.get_running_loop()
    moved_s = loop.time()
    retired: set[str] = set()
    context.telemetry.event("waiting_for_baseline", groups=wanted)
    reader = await context.log.reader(
        await context.log.first_positions(_places(context, RETIRED_GROUPS))
    )
    try:
        while len(retired) < wanted and not context.stop.is_set():
            before = len(retired)
            records = await reader.read(timeout_s=READ_TIMEOUT_S, records_max=RECORDS_MAX)
            retired.update(name for record in records if (name := _evaluated(record)))
            if len(retired) > before:
                moved_s = loop.time()
            elif loop.time() - moved_s > quiet_max_s:
                context.telemetry.event("baseline_given_up", groups=wanted, retired=len(retired))
                return
    finally:
        await reader.close()


async def _has_begun(context: Context) -> bool:
    """Whether a group of the round was admitted."""
    places = _places(context, ADMITTED_GROUPS)
    async for records in read_to_end(context.log, await context.log.first_positions(places)):
        for record in records:
            with contextlib.suppress(msgspec.ValidationError):
                group = topics.decode(ADMITTED_GROUPS, record.value)
                assert isinstance(group, AdmittedGroup)
                if group.purpose == "eval" and group.round_name.startswith(START_ROUND):
                    return True
    return False


def _evaluated(record: Record) -> str:
    """The id of an evaluation's group; "" of others. No other round begins before this one ends."""
    try:
        group = topics.decode(RETIRED_GROUPS, record.value)
    except msgspec.ValidationError:
        return ""
    assert isinstance(group, RetiredGroup)
    return group.group_id if group.purpose == "eval" else ""


def _places(context: Context, topic: Topic) -> list[Place]:
    count = topics.partition_count(topic, context.configuration)
    return [Place(topic.name, number) for number in range(count)]
