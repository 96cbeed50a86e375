"""Scheduler and reward as processes on the real broker, killed in the middle of their work."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Place
from forgemq_bus.partitions import partition_counts
from forgemq_contracts import topics
from forgemq_contracts.episodes import FinishedEpisode, ManifestEntry
from forgemq_contracts.groups import MergedGroup, RequestedGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, StartedRun, Trainer
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.weights import ReportedEngine
from forgemq_shell.records import emit_of
from tests.small_run import small_run
from tests.unit.reward.records import completion_id, finished_completion
from tests.unit.scheduler.scene import METRICS

MODEL = Path(__file__).parents[2] / "deploy/demo/model"
PARTITIONS = 2
GROUPS = ("g-0", "g-1", "g-2", "g-3")
CODE = """
def outcome(episode):
    return float(episode.task["k"] + len(episode.completions[0].text))

def process(episode):
    return [0.0 for _ in episode.completions]
"""


class Run:
    """One run on the broker with its two services; the test writes what other services would."""

    def __init__(self, log: KafkaLog, configuration: RunConfiguration, bootstrap: str) -> None:
        self.log = log
        self.configuration = configuration
        self.environ = {
            **os.environ,
            "FORGEMQ_RUN": configuration.run,
            "FORGEMQ_KAFKA": bootstrap,
            "FORGEMQ_REWARD_COMMIT_EVERY_S": "0.2",
        }
        self.processes: dict[str, Process] = {}

    async def open(self, folder: Path) -> None:
        await self.log.create_topics(partition_counts(small_run(group_partitions=PARTITIONS)))
        self.writer = await self.log.writer()
        started = StartedRun(
            run=self.configuration.run,
            configuration=self.configuration,
            blobs=(folder / "blobs").as_uri(),
            started_ms=0,
        )
        await self.write(topics.STARTED_RUNS, started)

    async def start(self, *services: str) -> None:
        for service in services:
            self.processes[service] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"forgemq_{service}", env=self.environ
            )

    async def kill(self, *services: str) -> None:
        for service in services:
            process = self.processes.pop(service)
            process.send_signal(signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL, "it had ended before"

    async def stop(self) -> list[int]:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        return [await process.wait() for process in self.processes.values()]

    async def write(
        self, topic: topics.Topic, record: msgspec.Struct, *, partition: int = 0
    ) -> int:
        return await self.writer.write(
            emit_of(Output(topic=topic.name, partition=partition, record=record))
        )

    async def records(self, topic: topics.Topic, *, count: int) -> list[msgspec.Struct]:
        """All records of the topic, read until there are `count` and no more arrive."""
        partitions = topics.partition_count(topic, small_run(group_partitions=PARTITIONS))
        reader = await self.log.reader({Place(topic.name, p): 0 for p in range(partitions)})
        found: list[msgspec.Struct] = []
        async with asyncio.timeout(60):
            while len(found) < count or (await self._read_into(found, reader, topic)):
                await self._read_into(found, reader, topic)
        await reader.close()
        return found

    async def _read_into(self, found, reader, topic) -> int:
        records = await reader.read(timeout_s=0.5, records_max=100)
        found += [topics.decode(topic, record.value) for record in records]
        return len(records)

    async def request(self, group: str) -> None:
        await self.write(
            topics.REQUESTED_GROUPS,
            RequestedGroup(
                group_id=group,
                domain="d",
                purpose="train",
                group_size=2,
                task=b"{}",
                idempotency_key=group,
                requested_ms=0,
            ),
        )

    async def play(self, group: str, index: int) -> None:
        partition = group_partition(group, partitions=PARTITIONS)
        offset = await self.write(
            topics.FINISHED_COMPLETIONS,
            finished_completion(index, 0, group=group, output=[9] * 3),
            partition=partition,
        )
        entry = ManifestEntry(
            completion_id=completion_id(index, 0, group=group),
            offset=offset,
            sequence=0,
            output_tokens=3,
        )
        episode = FinishedEpisode(
            episode_id=f"{group}.{index}.0",
            group_id=group,
            domain="d",
            purpose="train",
            group_size=2,
            index=index,
            attempt=0,
            status="completed",
            manifest=(entry,),
            task=b'{"k": %d}' % index,
        )
        await self.write(topics.FINISHED_EPISODES, episode, partition=partition)

    async def merge(self, group: str) -> None:
        partition = group_partition(group, partitions=PARTITIONS)
        merged = MergedGroup(
            group_id=group,
            domain="d",
            purpose="train",
            partition=partition,
            tree_sha256="0" * 64,
        )
        await self.write(topics.MERGED_GROUPS, merged, partition=partition)

    async def heartbeat(self, *, version: int) -> None:
        engine = ReportedEngine(
            lane=0,
            epoch=0,
            url="",
            is_serving=True,
            lineage=1,
            version=version,
            running=0,
            queued=0,
            reported_ms=0,
        )
        await self.write(topics.REPORTED_ENGINES, engine)

    async def train(self, step: int, groups: tuple[str, ...]) -> None:
        trained = TrainedStep(
            step=step,
            lineage=1,
            group_ids=groups,
            failed_group_ids=(),
            metrics=METRICS,
            checkpoint_step=step,
            duration_s=0.0,
        )
        await self.write(topics.TRAINED_STEPS, trained)


@pytest.fixture
async def run(
    new_run_id: Callable[[], str], kafka_bootstrap: str, tmp_path: Path
) -> AsyncIterator[Run]:
    (tmp_path / "integration_rewards.py").write_text(CODE)
    configuration = RunConfiguration(
        run=new_run_id(),
        seed=0,
        model=Model(path=str(MODEL), context_tokens_max=2048),
        queues=(
            Queue(
                domain="d",
                task_source="",
                agent="",
                outcome="integration_rewards:outcome",
                process="integration_rewards:process",
                group_size=2,
                slots=2,
                groups_per_step=1,
                window=2,
            ),
        ),
        trainer=Trainer(steps=4),
        log=LogLayout(group_partitions=PARTITIONS),
        code_paths=(str(tmp_path),),
    )
    log = KafkaLog(KafkaConnection(bootstrap=kafka_bootstrap), run=configuration.run)
    run = Run(log, configuration, kafka_bootstrap)
    await run.open(tmp_path)
    yield run
    for process in run.processes.values():
        if process.returncode is None:
            process.kill()
            await process.wait()
    await log.close()


@pytest.mark.integration
@pytest.mark.timeout(180)
async def test_killed_services_go_on_where_they_were_and_nothing_happens_twice(run: Run) -> None:
    await run.start("scheduler", "reward")
    await run.heartbeat(version=0)
    for group in GROUPS:
        await run.request(group)
    admitted = await run.records(topics.ADMITTED_GROUPS, count=2)
    assert [(group.group_id, group.queue_index) for group in admitted] == [("g-0", 0), ("g-1", 1)]

    await run.play("g-8", 0)
    await run.play("g-8", 1)
    await run.play("g-9", 0)
    await run.merge("g-1")
    await run.records(topics.SCORED_GROUPS, count=1)
    await run.records(topics.SCHEDULED_STEPS, count=1)
    await run.kill("scheduler", "reward")

    await run.merge("g-0")
    await run.train(0, ("g-1",))
    await run.play("g-9", 1)
    await run.heartbeat(version=1)
    await run.start("scheduler", "reward")
    scored = await run.records(topics.SCORED_GROUPS, count=2)
    assert {group.group_id: group.not_trainable for group in scored} == {"g-8": "", "g-9": ""}
    assert [[c.advantage for c in group.completions] for group in scored] == [[-0.5, 0.5]] * 2
    steps = await run.records(topics.SCHEDULED_STEPS, count=2)
    assert [step.groups[0].group_id for step in steps] == ["g-1", "g-0"]
    retired = await run.records(topics.RETIRED_GROUPS, count=1)
    assert [(group.group_id, group.reason, group.step) for group in retired] == [
        ("g-1", "trained", 0)
    ]
    admitted = await run.records(topics.ADMITTED_GROUPS, count=3)
    assert [group.group_id for group in admitted] == ["g-0", "g-1", "g-2"]
    grades = await run.records(topics.GRADED_EPISODES, count=4)
    assert sorted(grade.episode_id for grade in grades) == [
        f"{group}.{index}.0" for group in ("g-8", "g-9") for index in (0, 1)
    ]
    assert await run.stop() == [0, 0]
