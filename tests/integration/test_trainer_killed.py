"""kill -9 of the trainer between two updates of a step, and between what follows a step.

That is its weights' file, early publication, durable copy, publication, checkpoint and record.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import pytest
from stand_in_lane import heartbeat

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_contracts import topics
from forgemq_weight_relay import Receiver, WeightsKey
from tests.integration.killed_trainer import killed_configuration
from tests.unit.trainer.bench import Bench, create_topics
from tests.unit.trainer.scene import (
    agent_samples,
    merge,
    save_base,
    scheduled_step,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

Steps: TypeAlias = list[tuple[int, int]]
"""(step, lineage) of each record."""
Versions: TypeAlias = list[str]
"""lineage.version of each publication, with an asterisk if its durable copy was still to come."""

TRAINED_AGAIN: Steps = [(0, 1), (1, 2), (2, 2)]
RECORDED: Steps = [(0, 1), (1, 1), (2, 2)]
AFTER_STEP_1: Versions = ["2.2", "2.3*", "2.3"]
AFTER_STEP_0: Versions = ["2.1", "2.2*", *AFTER_STEP_1]

BY_RELAY = {"FORGEMQ_TRAINER_FAST_PATH": "relay"}
"""What the lane of this test takes; for any other way the trainer would wait until its deadline."""

RELAY_S = 10.0
"""For weights that were published to reach a lane of the same machine."""


@asynccontextmanager
async def _begun(bootstrap: str, run: str, folder: Path) -> AsyncIterator[Bench]:
    """A run whose trees and steps are on the log."""
    blobs = BlobStore(str(folder / "blobs"), run=run)
    log = KafkaLog(KafkaConnection(bootstrap=bootstrap), run=run, blobs=blobs)
    await create_topics(log)
    save_base(folder / "base")
    bench = Bench(
        log,
        lambda: log,
        killed_configuration(folder / "base"),
        folder / "trainer",
        environ=BY_RELAY,
    )
    generator = np.random.default_rng(0)
    trees = [merge(agent_samples(generator), f"g-{number}") for number in range(6)]
    await bench.put_trees(trees)
    steps = [scheduled_step(step, trees[2 * step : 2 * step + 2]) for step in range(3)]
    await bench.put_steps([*steps[:2], msgspec.structs.replace(steps[2], is_last=True)])
    try:
        yield bench
    finally:
        await log.close()


@pytest.fixture(scope="module")
def whole_sha256(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Of the last weights of the same run without a kill."""

    async def trained() -> str:
        async with _begun(kafka_bootstrap, new_run_id(), tmp_path_factory.mktemp("whole")) as bench:
            await bench.train(until=2)
            return (await bench.published())[-1].sha256

    return asyncio.run(trained())


@asynccontextmanager
async def _reporting_lane(bench: Bench, folder: Path) -> AsyncIterator[Receiver]:
    """A lane that takes relayed weights, as long as the block lasts."""

    def ignore(*_: object) -> None: ...

    run = bench.configuration.run
    receiver = Receiver(folder, run=run, host="127.0.0.1", on_relayed=ignore, on_broken=ignore)

    async def report_on() -> None:
        while True:
            report = heartbeat(weights_address=receiver.address)
            await bench.write(topics.REPORTED_ENGINES, report)
            await asyncio.sleep(0.2)

    reporting = asyncio.create_task(report_on())
    try:
        yield receiver
    finally:
        reporting.cancel()
        receiver.close()


@pytest.mark.parametrize(
    ("point", "steps", "versions"),
    [
        ("between two updates", TRAINED_AGAIN, ["1.0", "1.1", *AFTER_STEP_0]),
        ("before the weights are written", TRAINED_AGAIN, ["1.0", "1.1", *AFTER_STEP_0]),
        ("after the weights are written", TRAINED_AGAIN, ["1.0", "1.1", *AFTER_STEP_0]),
        ("after the early publication", TRAINED_AGAIN, ["1.0", "1.1", "1.2*", *AFTER_STEP_0]),
        ("after the durable copy", TRAINED_AGAIN, ["1.0", "1.1", "1.2*", *AFTER_STEP_0]),
        ("after the publication", TRAINED_AGAIN, ["1.0", "1.1", "1.2*", "1.2", *AFTER_STEP_0]),
        ("after the checkpoint", RECORDED, ["1.0", "1.1", "1.2*", "1.2", *AFTER_STEP_1]),
        ("after the record", RECORDED, ["1.0", "1.1", "1.2*", "1.2", *AFTER_STEP_1]),
    ],
)
async def test_a_kill_within_a_step_or_while_it_is_saved_loses_and_repeats_nothing(
    kafka_bootstrap: str,
    new_run_id: Callable[[], str],
    tmp_path: Path,
    whole_sha256: str,
    point: str,
    steps: Steps,
    versions: Versions,
) -> None:
    """After a restart the records are those of the table, the last bytes those without a kill."""
    run = new_run_id()
    async with _begun(kafka_bootstrap, run, tmp_path) as bench:
        async with _reporting_lane(bench, tmp_path / "lane") as lane:
            dying = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.integration.killed_trainer"),
                *(kafka_bootstrap, run, str(tmp_path), point),
            )
            assert await asyncio.wait_for(dying.wait(), 120) == -signal.SIGKILL
            await bench.train(until=2, lineage=2)
            assert lane.wait(WeightsKey(2, 3), timeout_s=RELAY_S) is not None
        assert [(step.step, step.lineage) for step in await bench.trained()] == steps
        published = await bench.published()
    found = [f"{each.lineage}.{each.version}{'' if each.is_durable else '*'}" for each in published]
    assert found == versions
    assert published[-1].sha256 == whole_sha256
