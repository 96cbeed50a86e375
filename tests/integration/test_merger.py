"""The merger as a process on the real broker, killed while it holds completions."""

import asyncio
import hashlib
import os
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path

import msgspec
import pytest

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Place
from forgemq_bus.partitions import partition_counts
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, StartedRun, Trainer
from forgemq_shell.records import emit_of
from tests.small_run import small_run
from tests.unit.merger.records import GROUP, finished, read_back, retired, scored

pytestmark = pytest.mark.integration


def configuration(run: str) -> RunConfiguration:
    return RunConfiguration(
        run=run,
        seed=0,
        model=Model(path="unused"),
        queues=(Queue(domain="shop", task_source="", agent=""),),
        trainer=Trainer(steps=1),
        log=LogLayout(group_partitions=1),
    )


class Scene:
    """A run with one partition and the merger; the test writes what other services would."""

    def __init__(self, log: KafkaLog, environ: dict[str, str]) -> None:
        self.log = log
        self.environ = environ
        self.merger: Process | None = None

    async def open(self, run: str, folder: Path) -> None:
        await self.log.create_topics(partition_counts(small_run(group_partitions=1)))
        self.writer = await self.log.writer()
        started = StartedRun(
            run=run,
            configuration=configuration(run),
            blobs=(folder / "blobs").as_uri(),
            started_ms=0,
        )
        await self.write(topics.STARTED_RUNS, started)

    async def write(self, topic: topics.Topic, record: msgspec.Struct) -> int:
        return await self.writer.write(
            emit_of(Output(topic=topic.name, partition=0, record=record))
        )

    async def start(self) -> None:
        self.merger = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "forgemq_merger", env=self.environ
        )

    async def kill(self) -> None:
        assert self.merger is not None
        self.merger.send_signal(signal.SIGKILL)
        assert await self.merger.wait() == -signal.SIGKILL, "it had ended before"

    async def stop(self) -> int:
        assert self.merger is not None
        self.merger.send_signal(signal.SIGTERM)
        return await self.merger.wait()

    async def records(self, topic: topics.Topic, *, count: int) -> list[msgspec.Struct]:
        """All committed records, read until there are `count` and no more arrive."""
        reader = await self.log.reader({Place(topic.name, 0): 0})
        found: list[msgspec.Struct] = []
        async with asyncio.timeout(60):
            while True:
                records = await reader.read(timeout_s=1.0, records_max=100)
                found += [topics.decode(topic, record.value) for record in records]
                if len(found) >= count and not records:
                    break
        await reader.close()
        return found


@pytest.fixture
async def scene(new_run_id, kafka_bootstrap, tmp_path):
    run = new_run_id()
    log = KafkaLog(KafkaConnection(bootstrap=kafka_bootstrap), run=run)
    scene = Scene(log, {**os.environ, "FORGEMQ_RUN": run, "FORGEMQ_KAFKA": kafka_bootstrap})
    await scene.open(run, tmp_path)
    yield scene
    if scene.merger is not None and scene.merger.returncode is None:
        scene.merger.kill()
        await scene.merger.wait()
    await log.close()


@pytest.mark.timeout(180)
async def test_a_killed_merger_still_has_its_completions_and_merges_each_group_once(scene):
    await scene.start()
    first = await scene.write(topics.FINISHED_COMPLETIONS, finished(0, None, 0, [1, 2], [3, 4]))
    done = await scene.write(
        topics.FINISHED_COMPLETIONS, finished(8, None, 0, [1], [2], group_id="g-done")
    )
    await scene.write(
        topics.SCORED_GROUPS, scored(8, offsets={8: done}, group_id="g-done", domain="shop")
    )
    await scene.records(topics.MERGED_GROUPS, count=1)
    await scene.kill()

    second = await scene.write(topics.FINISHED_COMPLETIONS, finished(1, 0, 4, [5], [6]))
    await scene.start()
    group = scored(0, 1, offsets={0: first, 1: second})
    await scene.write(topics.SCORED_GROUPS, group)
    await scene.write(topics.SCORED_GROUPS, group)
    summaries = await scene.records(topics.MERGED_GROUPS, count=2)
    trees = await scene.records(topics.MERGED_TREES, count=2)
    assert [summary.group_id for summary in summaries] == ["g-done", GROUP]
    for tree, summary in zip(trees, summaries, strict=True):
        assert hashlib.sha256(topics.encode(tree)).hexdigest() == summary.tree_sha256
    assert [sample["tokens"] for sample in read_back(trees[1]).values()] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
    ]

    await scene.write(topics.RETIRED_GROUPS, retired())
    assert await scene.stop() == 0
