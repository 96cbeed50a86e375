"""The trainer's end of the relay: when a version goes out, to whom, and which bytes."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forgemq_contracts import topics
from forgemq_contracts.weights import RelayedLane, ReportedEngine
from forgemq_trainer.storage.durable import DurableWeights
from forgemq_weight_relay import Receiver, WeightsKey
from tests.unit.trainer.bench import Bench, memory_bench
from tests.unit.trainer.scene import agent_samples, merge, scheduled_step

pytestmark = pytest.mark.wall_clock

WAIT_S = 20.0


async def _report(bench: Bench, address: str) -> None:
    while True:
        report = ReportedEngine(
            lane=0,
            epoch=4,
            url="http://127.0.0.1:9",
            is_serving=True,
            lineage=1,
            version=0,
            running=0,
            queued=0,
            reported_ms=0,
            weights_address=address,
        )
        await bench.write(topics.REPORTED_ENGINES, report)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("lane_is_there", [True, False])
async def test_a_version_is_relayed_while_it_is_made_durable_and_published_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane_is_there: bool
) -> None:
    """The durable copy waits until the lane has the version; a lane that is gone stops nothing."""

    def ignore(*_: object) -> None: ...

    receiver = Receiver(
        tmp_path / "lane", run="r", host="127.0.0.1", on_relayed=ignore, on_broken=ignore
    )
    if not lane_is_there:
        receiver.close()
    upload = DurableWeights.upload

    def waiting(self: DurableWeights, weights: Any) -> Any:
        if weights.folder.name == "1.1" and lane_is_there:
            found = receiver.wait(WeightsKey(1, 1), timeout_s=WAIT_S)
            assert found is not None, "the relay waits for the durable copy"
        return upload(self, weights)

    monkeypatch.setattr(DurableWeights, "upload", waiting)
    bench = await memory_bench(tmp_path, steps=1)
    bench = replace(bench, environ={"FORGEMQ_TRAINER_FAST_PATH": "relay"})
    trees = [merge(agent_samples(np.random.default_rng(0)), "g-0")]
    await bench.put_trees(trees)
    async with asyncio.TaskGroup() as tasks:
        reporting = tasks.create_task(_report(bench, receiver.address))
        training = tasks.create_task(bench.train(until=0))
        await bench.wait_for_start()
        await asyncio.sleep(1.0)  # Ten reports of the lane, so the trainer has read one.
        await bench.put_steps([scheduled_step(0, trees, is_last=True)])
        await training
        reporting.cancel()
    base, first = await bench.published()
    assert (base.relayed_to, first.relayed_to) == ((), (RelayedLane(lane=0, epoch=4),))
    if lane_is_there:
        found = receiver.wait(WeightsKey(1, 1), timeout_s=0)
        assert found is not None
        assert found.sha256_of("policy/model.safetensors") == first.sha256
        assert found.paths["policy/config.json"].exists()
        receiver.close()
