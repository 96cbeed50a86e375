"""How long the trainer waits for a store that is away."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.fields import BlobReference
from forgemq_trainer.core.store_patience import AWAY_S_MAX, StorePatience
from forgemq_trainer.tree_source import TreeSource
from tests.unit.trainer.bench import create_topics, memory_bench
from tests.unit.trainer.scene import agent_samples, merge, scheduled_step


def _tries(patience: StorePatience, *, since_s: float) -> list[float]:
    """When a store that is away is asked, until it is given up; seconds from the first failure."""
    now_s, tries = since_s, [0.0]
    while (delay_s := patience.delay_s(now_s=now_s)) is not None:
        now_s += delay_s
        tries.append(now_s - since_s)
    return tries


def test_pauses_double_up_to_a_bound_and_end() -> None:
    tries = _tries(StorePatience(), since_s=1000.0)
    assert tries[:8] == [0, 1, 3, 7, 15, 31, 47, 63]
    assert AWAY_S_MAX <= tries[-1] < AWAY_S_MAX + 16


def test_a_store_that_answered_may_be_away_as_long_again() -> None:
    patience = StorePatience()
    first = _tries(patience, since_s=0.0)
    assert patience.delay_s(now_s=1000.0) is None
    patience.answered()
    assert _tries(patience, since_s=2000.0) == first


class AbsentStore(BlobStore):
    """Answers no read before this time of the event loop."""

    back_s = 0.0

    async def get(self, reference: BlobReference) -> bytes:
        if asyncio.get_running_loop().time() < self.back_s:
            raise BlobError("no answer")
        return await super().get(reference)


async def test_trees_are_read_once_their_store_is_back(tmp_path: Path) -> None:
    store = AbsentStore(str(tmp_path / "blobs"), run="r")
    log = MemoryLog(run="r", blobs=store, inline_bytes_max=100)
    await create_topics(log)
    bench = dataclasses.replace(await memory_bench(tmp_path), log=log)
    trees = [merge(agent_samples(np.random.default_rng(0)), f"g-{number}") for number in range(2)]
    await bench.put_trees(trees)
    source = await TreeSource.open(log, partitions=2, since={}, telemetry=bench.telemetry)
    store.back_s = asyncio.get_running_loop().time() + AWAY_S_MAX - 20
    found = await source.collect(scheduled_step(0, trees))
    await source.close()
    assert found == {tree.group_id: topics.encode(tree) for tree in trees}
