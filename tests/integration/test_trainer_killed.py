"""kill -9 of the trainer between two updates of a step, and between what follows a step.

That is its weights' file, early publication, durable copy, publication, checkpoint and record.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import pytest
from stand_in_lane import heartbeat

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_contracts import topics
from forgemq_weight_relay import Receiver
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

_long = partial(pytest.param, marks=pytest.mark.long)


async def _bench(log: KafkaLog, folder: Path) -> Bench:
    await create_topics(log)
    save_base(folder / "base")
    bench = Bench(log, lambda: log, killed_configuration(folder / "base"), folder / "trainer")
    generator = np.random.default_rng(0)
    trees = [merge(agent_samples(generator), f"g-{number}") for number in range(6)]
    await bench.put_trees(trees)
    steps = [scheduled_step(step, trees[2 * step : 2 * step + 2]) for step in range(3)]
    await bench.put_steps([*steps[:2], msgspec.structs.replace(steps[2], is_last=True)])
    return bench


@asynccontextmanager
async def _reporting_lane(bench: Bench, folder: Path, run: str) -> AsyncIterator[None]:
    """A lane that takes relayed weights, as long as the block lasts."""

    def ignore(*_: object) -> None: ...

    receiver = Receiver(folder, run=run, host="127.0.0.1", on_relayed=ignore, on_broken=ignore)

    async def report_on() -> None:
        while True:
            report = heartbeat(weights_address=receiver.address)
            await bench.write(topics.REPORTED_ENGINES, report)
            await asyncio.sleep(0.2)

    reporting = asyncio.create_task(report_on())
    try:
        yield
    finally:
        reporting.cancel()
        receiver.close()


@pytest.mark.parametrize(
    ("point", "steps", "versions"),
    [
        ("between two updates", TRAINED_AGAIN, ["1.0", "1.1", *AFTER_STEP_0]),
        _long("before the weights are written", TRAINED_AGAIN, ["1.0", "1.1", *AFTER_STEP_0]),
        _long("after the weights are written", TRAINED_AGAIN, ["1.0", "1.1", *AFTER_STEP_0]),
        ("after the early publication", TRAINED_AGAIN, ["1.0", "1.1", "1.2*", *AFTER_STEP_0]),
        _long("after the durable copy", TRAINED_AGAIN, ["1.0", "1.1", "1.2*", *AFTER_STEP_0]),
        _long("after the publication", TRAINED_AGAIN, ["1.0", "1.1", "1.2*", "1.2", *AFTER_STEP_0]),
        ("after the checkpoint", RECORDED, ["1.0", "1.1", "1.2*", "1.2", *AFTER_STEP_1]),
        _long("after the record", RECORDED, ["1.0", "1.1", "1.2*", "1.2", *AFTER_STEP_1]),
    ],
)
async def test_a_kill_within_a_step_or_while_it_is_saved_loses_and_repeats_nothing(
    kafka_bootstrap: str,
    new_run_id: Callable[[], str],
    tmp_path: Path,
    point: str,
    steps: Steps,
    versions: Versions,
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
            async with _reporting_lane(bench, folder / "lane", run):
                dying = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "tests.integration.killed_trainer"),
                    *(kafka_bootstrap, run, str(folder), point),
                )
                assert await asyncio.wait_for(dying.wait(), 120) == -signal.SIGKILL
                await bench.train(until=2, lineage=2)
            assert [(step.step, step.lineage) for step in await bench.trained()] == steps
            found = [
                f"{each.lineage}.{each.version}{'' if each.is_durable else '*'}"
                for each in await bench.published()
            ]
            assert found == versions
        else:
            await bench.train(until=2)
        digests.append((await bench.published())[-1].sha256)
        await log.close()
    assert digests[0] == digests[1]
