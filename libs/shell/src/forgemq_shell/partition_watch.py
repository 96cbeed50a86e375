"""Ends a service if the topics of its run have other partitions than it counts on.

What it writes stays in its place even then, because the partition of every record follows from the
run's configuration. But consumer groups would divide the added partitions too.
"""

import asyncio

from forgemq_bus.errors import LogUnavailableError, PartitionCountError
from forgemq_bus.log import Log
from forgemq_bus.partitions import partition_counts
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import SHARED
from forgemq_shell.started_run import newest_start

ANNOUNCED_WITHIN_S = 3.0
"""A start of a run makes its topics, and then announces itself, after a few reads of the log."""


class GrownRunError(Exception):
    """The run was given more partitions since this service started; a new start reads them."""


async def check_partitions(
    log: Log, configuration: RunConfiguration, *, announced_within_s: float = ANNOUNCED_WITHIN_S
) -> None:
    """Check that the topics of the run have the partitions that its configuration gives them.

    If not, a newer start of the run may have made them: it has `announced_within_s` to say so.

    Raises:
        PartitionCountError: names the topic, and both numbers.
        GrownRunError: they have those of a newer start of the run.
        UnreadableRunError: perhaps so, but this release cannot read that start.
    """
    counts = _counts(configuration)
    try:
        return await log.check_counts(counts)
    except PartitionCountError:
        await asyncio.sleep(announced_within_s)
    newest = await newest_start(log, configuration.run)
    if newest is None or _counts(newest.configuration) == counts:
        return await log.check_counts(counts)
    await log.check_counts(_counts(newest.configuration))
    raise GrownRunError(
        f"run {configuration.run} has more partitions since its newest start, which this service "
        "does not know yet: start it again"
    )


async def watch_partitions(log: Log, configuration: RunConfiguration, *, every_s: float) -> None:
    """Check the partitions again and again, until cancelled; a broker that is away is no reason.

    Raises:
        PartitionCountError, GrownRunError, UnreadableRunError: as `check_partitions`.
    """
    while True:
        await asyncio.sleep(every_s)
        try:
            await check_partitions(log, configuration)
        except LogUnavailableError:
            continue


def _counts(configuration: RunConfiguration) -> dict[str, int]:
    """Of the run's own topics: a service may look at no other run's."""
    shared = {topic.name for topic in SHARED}
    counts = partition_counts(configuration)
    return {name: count for name, count in counts.items() if name not in shared}
