"""A run on a real broker: the test writes its episodes, and the real services score them."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

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
CODE = """
def outcome(episode):
    return float(episode.task["k"] + len(episode.completions[0].text))

def process(episode):
    return [0.0 for _ in episode.completions]
"""


class Run:
    """A run on the broker with some of its services; the test writes what the others would."""

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
        """Stop all services; returns their exit statuses."""
        stopped, self.processes = list(self.processes.values()), {}
        for process in stopped:
            process.send_signal(signal.SIGTERM)
        return [await process.wait() for process in stopped]

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
        episode = await self.played(group, index)
        await self.write(topics.FINISHED_EPISODES, episode, partition=partition)

    async def played(self, group: str, index: int) -> FinishedEpisode:
        """An episode whose completion is on the log, and whose own record is not."""
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
        return FinishedEpisode(
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


@asynccontextmanager
async def scored_run(run_id: str, bootstrap: str, folder: Path) -> AsyncIterator[Run]:
    """A run with one domain `d` whose groups are of two; no service is up yet."""
    (folder / "integration_rewards.py").write_text(CODE)
    configuration = RunConfiguration(
        run=run_id,
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
        code_paths=(str(folder),),
    )
    log = KafkaLog(KafkaConnection(bootstrap=bootstrap), run=configuration.run)
    run = Run(log, configuration, bootstrap)
    try:
        await run.open(folder)
        yield run
    finally:
        for process in run.processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
        await log.close()
