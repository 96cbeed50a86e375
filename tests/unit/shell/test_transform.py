import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from forgemq_bus.log import Log, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, Trainer
from forgemq_settings.environment import SettingsError
from forgemq_shell.loop_watch import LoopWatch
from forgemq_shell.records import emit_of
from forgemq_shell.transform import Transform
from forgemq_shell.transform_settings import TransformSettings
from forgemq_telemetry import Telemetry
from tests.simulation.counting_core import CountingCore
from tests.simulation.harness import records_of

PARTITIONS = 4
CONFIGURATION = RunConfiguration(
    run="r",
    seed=1,
    model=Model(path="model"),
    queues=tuple(
        Queue(domain=domain, task_source="m:t", agent="m:a", slots=64) for domain in ("a", "b", "c")
    ),
    trainer=Trainer(steps=1),
    log=LogLayout(group_partitions=PARTITIONS, lanes=2),
)
ENVIRON = {"FORGEMQ_TRANSFORM_BATCH_LINGER_S": "0", "FORGEMQ_TRANSFORM_REFENCE_AFTER_S": "0.05"}


@dataclass(kw_only=True)
class Process:
    """One process of the service: implements TransformContext."""

    log: Log
    configuration: RunConfiguration = CONFIGURATION
    environ: Mapping[str, str] = field(default_factory=lambda: ENVIRON)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    lines: io.StringIO = field(default_factory=io.StringIO)
    loop_watch: LoopWatch = field(default_factory=LoopWatch)

    @property
    def telemetry(self) -> Telemetry:
        return Telemetry(service="merger", stream=self.lines)

    def events(self, name: str) -> list[dict]:
        lines = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        return [line for line in lines if line["event"] == name]


def counting(core: type[CountingCore] = CountingCore) -> Transform:
    return Transform(
        service="merger",
        inputs=(topics.SCORED_GROUPS,),
        journal=topics.MERGER_JOURNAL,
        make_core=lambda partition: core(partition=partition),
        logic_version=1,
    )


@asynccontextmanager
async def running(process: Process, core: type[CountingCore] = CountingCore) -> AsyncIterator[None]:
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(counting(core).run(process))
        yield
        process.stop.set()


@pytest.fixture
async def log() -> AsyncIterator[MemoryLog]:
    log = MemoryLog(run="r")
    await log.create_topics({topic.name: PARTITIONS for topic in topics.OF_RUN})
    yield log
    await log.close()


async def score(log: MemoryLog, numbers: range) -> None:
    writer = await log.writer()
    for number in numbers:
        record = ScoredGroup(group_id=f"g-{number}", domain="a", purpose="train", episodes=())
        output = Output(
            topic=topics.SCORED_GROUPS.name, partition=number % PARTITIONS, record=record
        )
        await writer.write(emit_of(output))


async def merged(log: MemoryLog) -> dict[int, list[tuple[str, int]]]:
    places = [Place(topics.MERGED_GROUPS.name, number) for number in range(PARTITIONS)]
    written = await records_of(log, places)
    return {
        place.partition: [
            (record.group_id, record.loss_tokens)
            for record in (topics.decode(topics.MERGED_GROUPS, value) for _, value in records)
        ]
        for place, records in written.items()
    }


async def until_merged(log: MemoryLog, count: int) -> None:
    while sum(map(len, (await merged(log)).values())) < count:
        await log._store.wait_for_arrival(0.05)


def expected(numbers: range) -> dict[int, list[tuple[str, int]]]:
    """Each group once, in order, numbered per partition without a gap."""
    return {
        partition: [(f"g-{n}", i + 1) for i, n in enumerate(numbers[partition::PARTITIONS])]
        for partition in range(PARTITIONS)
    }


async def test_every_partition_is_a_task_of_its_own_core(log: MemoryLog):
    async with running(Process(log=log.open())):
        await score(log, range(40))
        await until_merged(log, 40)
    assert await merged(log) == expected(range(40))


async def test_the_loop_of_the_member_and_that_of_each_task_are_watched_until_they_end(
    log: MemoryLog,
):
    process = Process(log=log.open())
    async with running(process):
        await score(log, range(40))
        await until_merged(log, 40)
        watched = process.loop_watch.silent(silent_s_max=-1.0)
        assert watched == ("member", *(f"task-{number}" for number in range(PARTITIONS)))
    assert process.loop_watch.silent(silent_s_max=-1.0) == ()


async def test_two_processes_share_the_partitions_and_one_takes_over_from_the_other(
    log: MemoryLog,
):
    first, second = Process(log=log.open()), Process(log=log.open())
    async with running(first):
        await score(log, range(20))
        await until_merged(log, 20)
        async with running(second):
            while not second.events("assigned"):
                await log._store.wait_for_arrival(0.01)
            await score(log, range(20, 40))
            await until_merged(log, 40)
            held = second.events("assigned")[-1]["held"]
            assert 0 < len(held) < PARTITIONS
        await score(log, range(40, 60))
        await until_merged(log, 60)
        assert first.events("assigned")[-1]["held"] == list(range(PARTITIONS))
    assert await merged(log) == expected(range(60))


async def test_a_task_that_was_fenced_by_a_zombie_and_is_still_assigned_takes_over_again(
    log: MemoryLog,
):
    process = Process(log=log.open())
    async with running(process):
        await score(log, range(8))
        await until_merged(log, 8)
        await log.transaction_writer("merger-2")
        await score(log, range(8, 16))
        await until_merged(log, 16)
    assert [event["partition"] for event in process.events("fenced")] == [2]
    assert await merged(log) == expected(range(16))


async def test_a_stop_leaves_the_group_and_a_later_process_goes_on(log: MemoryLog):
    for start in (0, 12, 24):
        process = Process(log=log.open())
        async with running(process):
            await score(log, range(start, start + 12))
            await until_merged(log, start + 12)
        assert process.events("revoked")[0]["held"] == []
    assert await merged(log) == expected(range(36))


async def test_what_kills_a_task_ends_the_service(log: MemoryLog):
    writer = await log.transaction_writer("by-hand")
    journal, scored = topics.MERGER_JOURNAL.name, topics.SCORED_GROUPS.name
    await score(log, range(1))
    async with running(Process(log=log.open())):
        await until_merged(log, 1)
    await writer.commit(
        outputs=(),
        group="merger-positions",
        positions={Place(scored, 0): 0, Place(journal, 0): 0},
    )
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await asyncio.wait_for(counting().run(Process(log=log.open())), 10)


async def test_a_wrong_setting_is_refused_by_name(log: MemoryLog):
    process = Process(log=log.open(), environ={"FORGEMQ_TRANSFORM_BATCH_LINGER_S": "-1"})
    with pytest.raises(ExceptionGroup) as refused:
        await counting().run(process)
    assert refused.group_contains(SettingsError, match="^FORGEMQ_TRANSFORM_BATCH_LINGER_S")


def test_inputs_that_are_not_partitioned_as_the_journal_are_refused():
    with pytest.raises(ValueError, match=r"merger: .*trained-steps-v1"):
        Transform(
            service="merger",
            inputs=(topics.SCORED_GROUPS, topics.TRAINED_STEPS),
            journal=topics.MERGER_JOURNAL,
            make_core=lambda _: CountingCore(),
            logic_version=1,
        )


def test_the_only_task_of_a_run_reads_every_partition_of_every_input():
    transform = Transform(
        service="scheduler",
        inputs=(topics.REQUESTED_GROUPS, topics.MERGED_GROUPS, topics.REPORTED_ENGINES),
        journal=topics.SCHEDULER_JOURNAL,
        make_core=lambda _: CountingCore(),
        logic_version=1,
    )
    plan = transform.plan(0, configuration=CONFIGURATION, settings=TransformSettings())
    assert plan.inputs == (
        *(Place(topics.REQUESTED_GROUPS.name, n) for n in range(3)),
        *(Place(topics.MERGED_GROUPS.name, n) for n in range(PARTITIONS)),
        *(Place(topics.REPORTED_ENGINES.name, n) for n in range(2)),
    )
    assert plan.transactional_id == "scheduler-0"
