"""The trainer's end of the relay: when a version goes out, to whom, and which bytes."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from stand_in_lane import heartbeat

from forgemq_contracts import topics
from forgemq_contracts.speculation import Speculation
from forgemq_contracts.weights import RelayedLane
from forgemq_trainer.storage.durable import DurableWeights
from forgemq_weight_relay import Receiver, WeightsKey
from tests.unit.trainer.bench import Bench, memory_bench
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.scene import agent_samples, merge, scheduled_step

pytestmark = pytest.mark.wall_clock

WAIT_S = 20.0


async def _report(bench: Bench, address: str) -> None:
    while True:
        report = heartbeat(epoch=4, weights_address=address)
        await bench.write(topics.REPORTED_ENGINES, report)
        await asyncio.sleep(0.1)


def _receiver(folder: Path) -> Receiver:
    def ignore(*_: object) -> None: ...

    return Receiver(folder, run="r", host="127.0.0.1", on_relayed=ignore, on_broken=ignore)


async def _train_two_steps(bench: Bench, address: str) -> None:
    """Two steps beside a lane that reports this address, read before the first one."""
    generator = np.random.default_rng(0)
    trees = [merge(agent_samples(generator), f"g-{number}") for number in range(2)]
    await bench.put_trees(trees)
    async with asyncio.TaskGroup() as tasks:
        reporting = tasks.create_task(_report(bench, address))
        training = tasks.create_task(bench.train(until=1))
        await bench.wait_for_start()
        await asyncio.sleep(1.0)  # Ten reports of the lane, so the trainer has read one.
        steps = [scheduled_step(0, trees[:1]), scheduled_step(1, trees[1:], is_last=True)]
        await bench.put_steps(steps)
        await training
        reporting.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("lane_is_there", [True, False])
async def test_a_version_is_published_before_its_copy_and_again_when_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane_is_there: bool
) -> None:
    """The durable copy waits until the lane has the version; a lane that is gone stops nothing."""
    receiver = _receiver(tmp_path / "lane")
    if not lane_is_there:
        receiver.close()
    keep, found_before = DurableWeights.keep, []

    def waiting(self: DurableWeights, weights: Any) -> Any:
        if weights.folder.name == "1.2":
            if lane_is_there:
                found = receiver.wait(WeightsKey(1, 2), timeout_s=WAIT_S)
                assert found is not None, "the relay waits for the durable copy"
            found_before.append(asyncio.run_coroutine_threadsafe(records(), loop).result(WAIT_S))
        return keep(self, weights)

    async def records() -> tuple[int, int]:
        return len(await bench.published()), len(await bench.trained())

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(DurableWeights, "keep", waiting)
    bench = await memory_bench(tmp_path, steps=2)
    bench = replace(bench, environ={"FORGEMQ_TRAINER_FAST_PATH": "relay"})
    await _train_two_steps(bench, receiver.address)
    base, first, early, durable = await bench.published()
    assert [each.version for each in (base, first, early, durable)] == [0, 1, 2, 2]
    lane = (RelayedLane(lane=0, epoch=4),)
    assert [each.relayed_to for each in (base, first, early, durable)] == [(), lane, lane, lane]
    assert [each.is_durable for each in (base, first, early, durable)] == [True, True, False, True]
    assert found_before == [(3, 1)], "version 2 and the record of step 0 alone are on the log"
    # A lane reads the tensors' names of the version before, whose file is there.
    assert (early.uri, early.sha256) == (first.uri, durable.sha256)
    assert (early.sampled, early.deadline_s) == (durable.sampled, durable.deadline_s)
    if lane_is_there:
        found = receiver.wait(WeightsKey(1, 2), timeout_s=0)
        assert found is not None
        assert found.sha256_of("policy/model.safetensors") == durable.sha256
        assert found.paths["policy/config.json"].exists()
        receiver.close()


@pytest.mark.slow
async def test_an_early_head_is_described_by_the_durable_one_before_it(tmp_path: Path) -> None:
    """The first head has none before it, so its version is published with its copy alone."""
    receiver = _receiver(tmp_path / "lane")
    bench = await memory_bench(tmp_path, steps=4)
    speculation = Speculation(head=str(save_head(tmp_path / "head")), push_every_steps=2)
    bench = replace(
        bench,
        configuration=msgspec.structs.replace(bench.configuration, speculation=speculation),
        environ={"FORGEMQ_TRAINER_FAST_PATH": "relay"},
    )
    trees = [merge(agent_samples(np.random.default_rng(0)), f"g-{number}") for number in range(4)]
    await bench.put_trees(trees)
    async with asyncio.TaskGroup() as tasks:
        reporting = tasks.create_task(_report(bench, receiver.address))
        training = tasks.create_task(bench.train(until=3))
        await bench.wait_for_start()
        await asyncio.sleep(1.0)
        await bench.put_steps([scheduled_step(step, [tree]) for step, tree in enumerate(trees)])
        await training
        reporting.cancel()
    receiver.close()
    records = await bench.published()
    assert [(each.version, each.is_durable) for each in records] == [
        (0, True),
        (1, True),
        (2, True),
        *((3, False), (3, True)),
        *((4, False), (4, True)),
    ]
    second, *_, early, last = records[2:]
    assert second.head is not None
    assert early.head is not None
    assert last.head is not None
    assert early.head == msgspec.structs.replace(last.head, uri=second.head.uri)


async def test_a_trainer_whose_lanes_are_gone_publishes_durable_versions_alone(
    tmp_path: Path,
) -> None:
    bench = await memory_bench(tmp_path, steps=2)
    bench = replace(bench, environ={"FORGEMQ_TRAINER_FAST_PATH": "relay"})
    trees = [merge(agent_samples(np.random.default_rng(0)), f"g-{number}") for number in range(2)]
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees[:1]), scheduled_step(1, trees[1:])])
    await bench.train(until=1)
    assert [(each.version, each.is_durable) for each in await bench.published()] == [
        (0, True),
        (1, True),
        (2, True),
    ]
