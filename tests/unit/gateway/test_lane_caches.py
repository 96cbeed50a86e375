"""What the lanes should have of a context, by the completions that it follows."""

import pytest

from forgemq_contracts.arrays import pack_ids
from forgemq_gateway.core.completion_tokens import common_tokens
from forgemq_gateway.core.effects import SendAttempt
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.lane_caches import (
    FirstPrompts,
    LaneCache,
    cached_on,
    cached_tokens,
)
from tests.unit.gateway.completions import completion_of
from tests.unit.gateway.test_attempts import Scene

OLD, NEW = (1, 4), (1, 5)


def chain() -> KnownCompletion:
    """Three turns: on lanes 0 and 1, and on lane 0 again after an update."""
    first = completion_of(1, context=[1, 1, 1], output=[2], lane=0, weights=OLD)
    second = completion_of(
        2, parent=first, shared=4, context=[3], output=[4, 4], lane=1, weights=OLD
    )
    return completion_of(3, parent=second, shared=7, context=[5], output=[6], lane=0, weights=NEW)


@pytest.mark.parametrize(
    ("shared", "cached"),
    [
        (9, {(0, 1, NEW): 8, (1, 1, OLD): 6, (0, 1, OLD): 3}),
        (8, {(0, 1, NEW): 8, (1, 1, OLD): 6, (0, 1, OLD): 3}),
        (5, {(0, 1, NEW): 5, (1, 1, OLD): 5, (0, 1, OLD): 3}),
        (2, {(0, 1, NEW): 2, (1, 1, OLD): 2, (0, 1, OLD): 2}),
        (0, {}),
    ],
)
def test_a_lane_has_all_but_the_last_token_of_what_it_computed(
    shared: int, cached: dict[LaneCache, int]
) -> None:
    newest = chain()
    assert cached_tokens(newest, shared=shared, emptied={}) == cached
    lanes: list[LaneCache] = [(0, 1, NEW), (1, 1, OLD), (0, 1, OLD), (2, 1, NEW), (0, 2, NEW)]
    for where in lanes:
        assert cached_on(where, newest, shared=shared, emptied={}) == cached.get(where, 0)


def test_without_a_completion_nothing_is_cached() -> None:
    assert cached_tokens(None, shared=0, emptied={}) == {}
    assert cached_on((0, 1, OLD), None, shared=0, emptied={}) == 0


def test_of_the_siblings_on_a_lane_the_newest_counts() -> None:
    prompts = FirstPrompts()
    first = completion_of(1, context=[1, 1, 1], output=[2], weights=OLD)
    second = completion_of(2, context=[1, 9, 9], output=[2], weights=OLD)
    other = completion_of(3, context=[1, 1, 1], output=[2], lane=2, weights=NEW)
    for each in (first, second, other):
        prompts.note(each)
    assert prompts.cached_tokens(pack_ids([1, 1, 1]), emptied={}) == {
        (0, 1, OLD): 1,
        (2, 1, NEW): 3,
    }
    assert prompts.cached_on((2, 1, NEW), pack_ids([1, 1]), emptied={}) == 2
    assert prompts.cached_on((2, 1, OLD), pack_ids([1, 1]), emptied={}) == 0


PARENT = completion_of(1, context=[5] * 90, output=[7] * 10, weights=(1, 3), taken_ms=1000)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({"version": 3}, 99),  # All but the last token, which was sampled and never read.
        ({"version": 4}, 0),
        ({"version": 3, "epoch": 2}, 0),
        ({"version": 3, "lane": 1}, 0),
        ({"version": 3, "cache_since_ms": 1000}, 99),
        ({"version": 3, "cache_since_ms": 1001}, 0),  # Its engine was started again.
    ],
)
def test_a_lane_should_have_what_it_computed_under_its_weights_and_epoch(
    reported: dict[str, int], expected: int
) -> None:
    scene = Scene()
    scene.report(**reported)
    scene.dispatch(parent=PARENT, context=[1, 2, 3])
    assert scene.turn.cached_expected == expected


@pytest.mark.parametrize(
    ("context", "expected"),
    [([5] * 90, 89), ([5] * 60 + [6], 60), ([5] * 90 + [7] * 20, 99), ([6] * 9, 0), ([5], 0)],
    ids=["the same", "begins alike", "goes on as the reply", "another", "one token"],
)
def test_a_first_turn_should_find_the_prompt_of_its_sibling(
    context: list[int], expected: int
) -> None:
    """An engine reads the last token of a context again."""
    scene = Scene()
    scene.episode.first_prompts.note(PARENT)
    scene.report(version=3)
    scene.dispatch(context=context)
    assert scene.turn.cached_expected == expected


def test_an_engine_that_was_started_again_has_no_prompt_of_before() -> None:
    scene = Scene()
    scene.episode.first_prompts.note(PARENT)
    scene.report(version=3)
    scene.report(version=3, is_serving=False)
    scene.report(version=3, cache_since_ms=1001)
    scene.dispatch(context=[5] * 90)
    assert scene.turn.cached_expected == 0


def test_a_turn_leaves_an_engine_that_lost_its_context() -> None:
    """Both lanes computed a part of it; the one that had more of it was started again."""
    first = completion_of(1, context=[5] * 900, output=[7], lane=1, weights=NEW)
    second = completion_of(
        2, parent=first, shared=901, context=[6] * 900, output=[7], lane=0, weights=NEW
    )
    for cache_since_ms, lane in ((0, 0), (1, 1)):
        scene = Scene()
        scene.report(lane=0, version=5, cache_since_ms=cache_since_ms)
        scene.report(lane=1, version=5)
        (sent,) = scene.dispatch(parent=second, context=[8] * 10)
        assert isinstance(sent, SendAttempt)
        assert sent.record.lane == lane


def test_what_an_engine_lost_is_in_a_pool_all_the_same() -> None:
    lost = {0: 1}
    assert cached_tokens(chain(), shared=9, emptied=lost) == {
        (0, -1, NEW): 8,
        (1, 1, OLD): 6,
        (0, -1, OLD): 3,
    }


def test_a_first_turn_goes_where_a_sibling_has_been() -> None:
    scene = Scene()
    first = completion_of(1, context=[5] * 90, output=[7], lane=1, weights=(1, 3))
    scene.episode.first_prompts.note(first)
    scene.report(lane=0, version=3)
    scene.report(lane=1, version=3)
    (sent,) = scene.dispatch(context=[5] * 90)
    assert isinstance(sent, SendAttempt)
    assert sent.record.lane == 1


def test_of_a_lane_only_the_prompts_of_its_newest_weights_are_kept() -> None:
    """A completion that began before an update and ends after it hides nothing of the newer."""
    prompts = FirstPrompts()
    old = completion_of(1, context=[5] * 90, output=[7], weights=OLD)
    new = completion_of(2, context=[5] * 40, output=[7], weights=NEW)
    unsampled = completion_of(3, context=[5] * 90, output=[], weights=None)
    restarted = completion_of(4, context=[5] * 30, output=[7], weights=OLD, epoch=2)
    for each, cached in (
        (old, {(0, 1, OLD): 90}),
        (new, {(0, 1, NEW): 40}),
        (old, {(0, 1, NEW): 40}),
        (unsampled, {(0, 1, NEW): 40}),
        (restarted, {(0, 2, OLD): 30}),
        (new, {(0, 2, OLD): 30}),
    ):
        prompts.note(each)
        assert prompts.cached_tokens(pack_ids([5] * 90), emptied={}) == cached


def test_a_group_that_begins_finds_what_other_groups_began_with() -> None:
    of_run = FirstPrompts()
    mine, other = FirstPrompts(of_run), FirstPrompts(of_run)
    theirs = completion_of(1, context=[1, 2, 3, 4], output=[5], weights=OLD)
    other.note(theirs)
    assert mine.cached_tokens(pack_ids([1, 2, 9]), emptied={}) == {(0, 1, OLD): 2}
    sibling = completion_of(2, context=[1, 2, 9, 9], output=[5], weights=OLD)
    mine.note(sibling)
    assert mine.cached_on((0, 1, OLD), pack_ids([1, 2, 9, 8]), emptied={}) == 3
    assert other.cached_on((0, 1, OLD), pack_ids([1, 2, 3, 4]), emptied={}) == 4


@pytest.mark.parametrize("alike", [0, 1, 255, 256, 257, 767, 768, 769, 2000, 4999, 5000])
def test_long_contexts_are_compared_up_to_the_first_token_that_differs(alike: int) -> None:
    """Blocks of 256 tokens, then twice as many each: around their ends nothing is special."""
    left = list(range(5000))
    right = left[:alike] + [-1] * (5000 - alike)
    assert common_tokens(pack_ids(left), pack_ids(right)) == alike
    assert common_tokens(pack_ids(left), pack_ids(right[:4999])) == min(alike, 4999)
    assert common_tokens(pack_ids(left[:alike]), pack_ids(right)) == alike
