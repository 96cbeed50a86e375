"""The window of one queue, alone and inside the scheduler."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.groups import MergedGroup
from forgemq_contracts.mixture import Mixture
from forgemq_scheduler.core.window import WindowedFifo
from tests.unit.scheduler.scene import Scene, configuration_of, queue_of


def merged(index: int) -> MergedGroup:
    return MergedGroup(
        group_id=f"g-{index}", domain="d", purpose="train", partition=0, tree_sha256="0" * 64
    )


def filled(count: int, *, window: int) -> WindowedFifo:
    fifo = WindowedFifo(window=window)
    for _ in range(count):
        fifo.append()
    return fifo


def take_all(fifo: WindowedFifo) -> list[int]:
    taken = []
    while (takeable := fifo.next_takeable()) is not None:
        fifo.take(takeable[0])
        fifo._check()
        taken.append(takeable[0])
    return taken


def test_a_slow_head_is_overtaken_by_at_most_window_minus_one_groups():
    fifo = filled(8, window=4)
    for index in range(1, 8):
        fifo.finish(index, merged(index))
    assert take_all(fifo) == [1, 2, 3]
    assert fifo.head == 0


def test_inside_the_window_the_one_that_finished_first_is_taken_first():
    fifo = filled(4, window=4)
    for index in (2, 0, 3):
        fifo.finish(index, merged(index))
    assert take_all(fifo) == [2, 0, 3]
    assert fifo.head == 1


def test_the_head_jumps_over_what_was_taken_before_it():
    fifo = filled(6, window=3)
    for index in (1, 2, 0, 3, 4):
        fifo.finish(index, merged(index))
    assert take_all(fifo) == [1, 2, 0, 3, 4]
    assert fifo.head == 5


def test_a_group_that_retires_untrained_is_no_position_and_a_taken_one_is():
    fifo = filled(6, window=3)
    for index in (1, 3, 4):
        fifo.finish(index, merged(index))
    assert take_all(fifo) == [1]
    fifo.remove(2)
    assert take_all(fifo) == [3]  # positions are now 0, 1, 3
    fifo.remove(0)
    assert take_all(fifo) == [4]
    assert fifo.head == 5


def test_a_window_of_one_is_strict_fifo():
    fifo = filled(4, window=1)
    for index in (3, 2, 1, 0):
        fifo.finish(index, merged(index))
    assert take_all(fifo) == [0, 1, 2, 3]


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        WindowedFifo(window=0)


def first_of_the_window(fifo: WindowedFifo, *, window: int) -> int | None:
    """The definition, by a look at everything: the oldest finish among the first W positions."""
    _, order, _, finished = fifo.snapshot()
    return next((index for index, _ in finished if index in order[:window]), None)


@given(
    window=st.integers(1, 5),
    moves=st.lists(
        st.tuples(st.sampled_from(["append", "finish", "remove", "take"]), st.integers(0, 30))
    ),
)
def test_no_order_of_events_breaks_the_window(window, moves):
    fifo = WindowedFifo(window=window)
    for move, number in moves:
        untaken = [index for index in range(fifo.next_index) if fifo.is_untaken(index)]
        index = untaken[number % len(untaken)] if untaken else None
        if move == "append":
            fifo.append()
        elif move == "take":
            takeable = fifo.next_takeable()
            if takeable is not None:
                head = fifo.head
                fifo.take(takeable[0])
                overtaken = [i for i in range(head, takeable[0]) if fifo.is_untaken(i)]
                assert len(overtaken) < window
        elif index is not None and move == "finish":
            fifo.finish(index, merged(index))
        elif index is not None:
            fifo.remove(index)
        fifo._check()
        takeable = fifo.next_takeable()
        assert (takeable and takeable[0]) == first_of_the_window(fifo, window=window)
        restored = WindowedFifo(window=window)
        next_index, order, taken_now, finished = fifo.snapshot()
        restored.restore(next_index=next_index, order=order, taken=taken_now, finished=finished)
        assert restored.snapshot() == fifo.snapshot()
        restored._check()
        assert restored.next_takeable() == takeable


def slowest_last(*, slots: int, per_step: int, window: int, steps: int) -> int:
    """Largest staleness when the last group admitted at version 0 finishes as late as it can."""
    queue = queue_of(slots=slots, per_step=per_step, window=window)
    scene = Scene(configuration_of(queue, steps=steps))
    scene.report(version=0)
    scene.request(*range(3 * slots + 2 * window))
    slow, merged_ids, trained = slots - 1, set(), 0
    while len(scene.steps) < steps:
        before = (len(scene.admitted), len(scene.steps), trained)
        fresh = [n for n in scene.admitted_ids() if n != slow and n not in merged_ids]
        version = trained
        scene.merge(*fresh, version=version)
        merged_ids.update(fresh)
        while trained < len(scene.steps):
            scene.train(trained)
            trained += 1
            scene.load(version=trained)
        if before == (len(scene.admitted), len(scene.steps), trained):
            if slow in merged_ids:
                break
            scene.merge(slow, version=0)
            merged_ids.add(slow)
    assert "stale" not in scene.ends().values()
    return max(group.staleness for step in scene.steps for group in step.groups)


@pytest.mark.parametrize(
    ("slots", "per_step", "window", "bound"),
    [(12, 6, 4, 2), (8, 1, 4, 10), (8, 2, 1, 3), (64, 32, 20, 2), (10, 3, 10, 6)],
)
def test_the_staleness_bound_is_reached_and_never_passed(slots, per_step, window, bound):
    """G3: floor((N + W - 2) / P) exactly; N=8, W=4, P=1 is the published lag of 10."""
    queue = queue_of(slots=slots, per_step=per_step, window=window)
    assert Mixture([queue], ()).staleness_bound(0) == bound
    steps = bound + 1
    assert slowest_last(slots=slots, per_step=per_step, window=window, steps=steps) == bound
