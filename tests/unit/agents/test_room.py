"""Room for episodes: training first, evaluations at least a share, nothing lost."""

import asyncio

import pytest

from forgemq_agents.room import Reservation, Room


async def _entered(room: Room, count: int, *, is_training: bool) -> list[asyncio.Task[Reservation]]:
    tasks = [asyncio.create_task(room.enter(is_training=is_training)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def _inside(tasks: list[asyncio.Task[Reservation]]) -> list[int]:
    return [index for index, task in enumerate(tasks) if task.done()]


async def test_evaluations_take_all_that_training_leaves_and_keep_a_share_of_it() -> None:
    room = Room(8)
    evaluating = await _entered(room, 10, is_training=False)
    assert _inside(evaluating) == list(range(8))
    training = await _entered(room, 8, is_training=True)
    assert _inside(training) == []
    for task in evaluating[:8]:
        task.result().leave()
        await asyncio.sleep(0)
    # Six left to training; two of the eight places are owed to the two that waited.
    assert _inside(training) == list(range(6))
    assert _inside(evaluating) == list(range(10))


async def test_one_of_two_places_is_owed_to_an_evaluation() -> None:
    room = Room(2)
    training = await _entered(room, 3, is_training=True)
    evaluating = await _entered(room, 1, is_training=False)
    assert _inside(training) == [0, 1]
    training[0].result().leave()
    await asyncio.sleep(0)
    assert _inside(evaluating) == [0]
    assert _inside(training) == [0, 1]


async def test_a_place_that_nobody_waits_for_any_more_goes_to_the_next() -> None:
    room = Room(1)
    (inside,) = await _entered(room, 1, is_training=True)
    gone, late, next_one = await _entered(room, 3, is_training=True)
    gone.cancel()
    (await inside).leave()
    # Cancelled in the moment in which the place became its own.
    late.cancel()
    await asyncio.sleep(0.01)
    assert next_one.done()
    for task in (gone, late):
        with pytest.raises(asyncio.CancelledError):
            await task
    next_one.result().leave()
    (again,) = await _entered(room, 1, is_training=True)
    assert again.done()
