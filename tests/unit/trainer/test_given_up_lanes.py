"""For which reports of a lane the trainer stops waiting for it."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from stand_in_lane import heartbeat

from forgemq_contracts.weights import LoadedWeights
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.transfer_deadline import TransferDeadline
from tests.unit.trainer.publisher_scene import publishing


class NotedPaths(FastPaths):
    """Broadcasts to no lane, and keeps the lanes that were given up."""

    def __init__(self) -> None:
        super().__init__(host="127.0.0.1", backend="gloo", deadline=TransferDeadline(1.0, 1e9))
        self.given_up: list[int] = []

    def give_up(self, lane: int) -> None:
        self.given_up.append(lane)


@pytest.mark.parametrize(("epoch", "given_up"), [(1, []), (2, [0]), (3, [0])])
async def test_a_lane_that_leaves_is_given_up_by_its_own_words_and_not_by_its_predecessors(
    tmp_path: Path, epoch: int, given_up: list[int]
) -> None:
    """A process that was replaced says that it leaves once it has noticed, after its successor."""
    paths = NotedPaths()
    async with publishing(tmp_path, paths) as publisher:
        publisher.observe_engine(heartbeat(epoch=2), at_s=10.0)
        leaving = replace(heartbeat(epoch=epoch), is_serving=False)
        publisher.observe_engine(leaving, at_s=11.0)
    assert paths.given_up == given_up


@pytest.mark.parametrize(("epoch", "given_up"), [(1, []), (2, [0])])
async def test_what_a_predecessor_loaded_gives_up_nobody(
    tmp_path: Path, epoch: int, given_up: list[int]
) -> None:
    """Loads and heartbeats come on two topics, in no common order."""
    paths = NotedPaths()
    async with publishing(tmp_path, paths) as publisher:
        publisher.observe_engine(heartbeat(epoch=2), at_s=10.0)
        publisher.observe_loaded(
            LoadedWeights(
                lane=0,
                epoch=epoch,
                lineage=1,
                version=0,
                path="durable",
                duration_s=1.0,
                paused_s=1.0,
            )
        )
    assert paths.given_up == given_up
