"""kill -9 of the trainer between two updates of a step, and between what follows a step.

That is its durable copy, checkpoint, record and publication.
"""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from tests.integration.killed_trainer import killed_configuration
from tests.unit.trainer.bench import Bench, create_topics
from tests.unit.trainer.scene import (
    agent_samples,
    merge,
    save_base,
    scheduled_step,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

UNRECORDED = ([(0, 2), (1, 2)], [(1, 0), (2, 0), (2, 1), (2, 2)])
"""(step, lineage) of the records, and (lineage, version) of the publications."""
WITHIN_STEP_1 = ([(0, 1), (1, 2)], [(1, 0), (1, 1), (2, 1), (2, 2)])
CHECKPOINTED = ([(0, 1), (1, 2)], [(1, 0), (2, 1), (2, 2)])
PUBLISHED = ([(0, 1), (1, 2)], [(1, 0), (1, 1), (2, 1), (2, 2)])


async def _bench(log: KafkaLog, folder: Path) -> Bench:
    await create_topics(log)
    save_base(folder / "base")
    bench = Bench(log, lambda: log, killed_configuration(folder / "base"), folder / "trainer")
    generator = np.random.default_rng(0)
    trees = [merge(agent_samples(generator), f"g-{number}") for number in range(4)]
    await bench.put_trees(trees)
    steps = [scheduled_step(0, trees[:2]), scheduled_step(1, trees[2:], is_last=True)]
    await bench.put_steps(steps)
    return bench


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("between two updates", WITHIN_STEP_1),
        ("before the durable copy", UNRECORDED),
        ("after the durable copy", UNRECORDED),
        ("after the checkpoint", CHECKPOINTED),
        ("after the record", CHECKPOINTED),
        ("after publishing", PUBLISHED),
    ],
)
async def test_a_kill_within_a_step_or_while_it_is_saved_loses_and_repeats_nothing(
    kafka_bootstrap: str,
    new_run_id: Callable[[], str],
    tmp_path: Path,
    point: str,
    expected: tuple[list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    """After a restart the records are those of the table, the last bytes those without a kill."""
    digests = []
    for name in ("killed", "whole"):
        run, folder = new_run_id(), tmp_path / name
        folder.mkdir()
        blobs = BlobStore(str(folder / "blobs"), run=run)
        log = KafkaLog(KafkaConnection(bootstrap=kafka_bootstrap), run=run, blobs=blobs)
        bench = await _bench(log, folder)
        if name == "killed":
            dying = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.integration.killed_trainer"),
                *(kafka_bootstrap, run, str(folder), point),
            )
            assert await asyncio.wait_for(dying.wait(), 120) == -signal.SIGKILL
            await bench.train(until=1, lineage=2)
            records = [(step.step, step.lineage) for step in await bench.trained()]
            assert (records, [(w.lineage, w.version) for w in await bench.published()]) == expected
        else:
            await bench.train(until=1)
        digests.append((await bench.published())[-1].sha256)
        await log.close()
    assert digests[0] == digests[1]
