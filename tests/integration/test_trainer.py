"""The trainer on the real broker, and its fast path into a peer process instead of an engine."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from stand_in_lane import heartbeat

from forgemq_bus.kafka import KafkaLog
from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_contracts.weights import PublishedWeights
from tests.unit.trainer.bench import Bench, create_topics
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
    merge,
    save_base,
    scheduled_step,
)

PEER = Path(__file__).with_name("fast_path_peer.py")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def _trees(count: int):
    generator = np.random.default_rng(0)
    return [merge(agent_samples(generator), f"g-{number}") for number in range(count)]


async def _bench(log: KafkaLog, folder: Path) -> Bench:
    await create_topics(log)
    base = save_base(folder / "base")
    return Bench(log, lambda: log, configuration_of(base), folder / "trainer")


async def test_steps_on_the_broker_become_weights_across_a_restart(
    kafka_log: KafkaLog, tmp_path: Path
) -> None:
    bench = await _bench(kafka_log, tmp_path)
    trees = _trees(6)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(k, trees[2 * k : 2 * k + 2]) for k in range(2)])
    await bench.train(until=1)
    await bench.put_steps([scheduled_step(2, trees[4:], is_last=True)])
    await bench.train(until=2)
    trained = await bench.trained()
    assert [(step.step, step.lineage) for step in trained] == [(0, 1), (1, 1), (2, 2)]
    assert [group for step in trained for group in step.group_ids] == [f"g-{n}" for n in range(6)]
    assert not any(step.failed_group_ids for step in trained)
    published = [(w.lineage, w.version) for w in await bench.published()]
    assert published == [(1, 0), (1, 1), (1, 2), (2, 2), (2, 3)]


async def _report_lane(bench: Bench) -> None:
    while True:
        await bench.write(topics.REPORTED_ENGINES, heartbeat(epoch=4))
        await asyncio.sleep(0.2)


async def _receive(bench: Bench) -> str:
    """Join the first fast path that is offered; returns the peer's verdict on the bytes."""
    reader = await bench.log.reader({Place(topics.PUBLISHED_WEIGHTS.name, 0): 0})
    while True:
        for record in await reader.read(timeout_s=1, records_max=1):
            published = topics.decode(topics.PUBLISHED_WEIGHTS, record.value)
            assert isinstance(published, PublishedWeights)
            if not published.fast_paths:
                continue
            (offer,) = published.fast_paths
            assert (offer.lane, offer.epoch, offer.is_new) == (0, 4, True)
            peer = await asyncio.create_subprocess_exec(
                sys.executable,
                str(PEER),
                offer.host,
                str(offer.port),
                offer.group_name,
                "-1",
                str(Path(published.uri) / "model.safetensors"),
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await asyncio.wait_for(peer.communicate(), 60)
            await reader.close()
            return output.decode().strip()


async def test_new_weights_reach_a_live_lane_through_its_process_group(
    kafka_log: KafkaLog, tmp_path: Path
) -> None:
    bench = await _bench(kafka_log, tmp_path)
    trees = _trees(4)
    await bench.put_trees(trees)
    async with asyncio.TaskGroup() as group:
        lane = group.create_task(_report_lane(bench))
        receiving = group.create_task(_receive(bench))
        training = group.create_task(bench.train(until=1))
        started = await bench.log.reader({Place(topics.PUBLISHED_WEIGHTS.name, 0): 0})
        assert await started.read(timeout_s=60, records_max=1)
        await asyncio.sleep(2.0)  # Ten reports of the lane, so the trainer has read one.
        await bench.put_steps([scheduled_step(0, trees[:2])])
        assert await receiving == "equal"
        last = replace(scheduled_step(1, trees[2:]), is_last=True)
        await bench.put_steps([last])
        lane.cancel()
        await training
    # The peer left after one version: sending the next one fails, and the trainer continues.
    assert [step.step for step in await bench.trained()] == [0, 1]
