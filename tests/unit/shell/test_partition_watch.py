"""Topics that gained partitions, by a newer start of the run or behind its back."""

import asyncio

import msgspec
import pytest

from forgemq_bus.errors import LogUnavailableError, PartitionCountError
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partition_counts
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.run import RunConfiguration, StartedRun
from forgemq_shell.partition_watch import GrownRunError, check_partitions, watch_partitions
from forgemq_shell.records import emit_of
from tests.small_run import small_run

WAS = small_run(group_partitions=2)
WIDER = msgspec.structs.replace(WAS, log=msgspec.structs.replace(WAS.log, lanes_max=3))
LANES = topics.REPORTED_ENGINES.name


async def log_of_run() -> MemoryLog:
    log = MemoryLog(run=WAS.run)
    await log.create_topics(partition_counts(WAS))
    await announce(log, WAS)
    return log


async def announce(log: MemoryLog, configuration: RunConfiguration) -> None:
    started = StartedRun(run=WAS.run, configuration=configuration, blobs="/b", started_ms=0)
    output = Output(topic=topics.STARTED_RUNS.name, partition=0, record=started)
    await (await log.writer()).write(emit_of(output))


async def grow(log: MemoryLog, topic: str, partitions: int) -> None:
    await log.create_topics({topic: partitions}, may_grow=[topic])


@pytest.mark.parametrize(
    "topic", [LANES, topics.MERGER_JOURNAL.name, topics.SCORED_GROUPS.dlq_name]
)
async def test_partitions_that_no_start_announces_are_refused_by_topic_and_numbers(topic) -> None:
    log = await log_of_run()
    await check_partitions(log, WAS, announced_within_s=0)
    count = partition_counts(WAS)[topic]
    await grow(log, topic, 5)
    words = rf"topic {WAS.run}\.{topic} has 5 partitions, and its run counts on {count}"
    with pytest.raises(PartitionCountError, match=words):
        await check_partitions(log, WAS, announced_within_s=0)


async def test_partitions_of_a_newer_start_ask_for_a_start_of_the_service() -> None:
    log = await log_of_run()
    for topic in topics.OF_RUN:
        if topic.partitioned_by == "lane":
            await grow(log, topic.name, 3)
    with pytest.raises(PartitionCountError):
        await check_partitions(log, WAS, announced_within_s=0)
    await announce(log, WIDER)
    with pytest.raises(GrownRunError, match="start it again"):
        await check_partitions(log, WAS, announced_within_s=0)
    await check_partitions(log, WIDER, announced_within_s=0)
    await grow(log, topics.SCORED_GROUPS.name, 4)
    with pytest.raises(PartitionCountError, match=topics.SCORED_GROUPS.name):
        await check_partitions(log, WAS, announced_within_s=0)


class Away(MemoryLog):
    """A log whose broker does not answer the first two looks."""

    looks = 0

    async def check_counts(self, partitions: object) -> None:
        self.looks += 1
        if self.looks <= 2:
            raise LogUnavailableError("away")
        raise PartitionCountError("grown")


async def test_a_broker_that_is_away_ends_no_service_and_is_asked_again() -> None:
    log = Away(run=WAS.run)
    await log.create_topics(partition_counts(WAS))
    with pytest.raises(PartitionCountError, match="grown"):
        await asyncio.wait_for(watch_partitions(log, WAS, every_s=0.001), 10)
    assert log.looks == 4, "the last one a second look at what was found"
