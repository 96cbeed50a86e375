"""What a view holds, and looks at for its state, follows the steps of a run and not its groups."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.groups import ScoredCompletion, ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.steps import ScheduledGroup
from forgemq_contracts.topics import FINISHED_COMPLETIONS, SCORED_GROUPS, TRAINED_STEPS
from forgemq_run_view.engines import RATE_SPAN_MS, SECONDS_KEPT_MAX, EngineBook
from forgemq_run_view.groups import GroupBook
from forgemq_run_view.steps import StepBook
from forgemq_run_view.view import RunView
from tests.held_objects import held_objects
from tests.unit.run_view.synthetic import DOMAIN, SyntheticRun, started

STEPS = 20


def scheduled(number: int, *, version: int) -> ScheduledGroup:
    return ScheduledGroup(
        group_id=f"g-{number}",
        domain=DOMAIN,
        queue_index=number,
        partition=0,
        tree_sha256="0" * 64,
        tree_tokens=9,
        loss_tokens=9,
        attention_pairs=9,
        version_min=version,
        staleness=0,
    )


def scored(number: int, *, completions: int) -> ScoredGroup:
    return ScoredGroup(
        group_id=f"g-{number}",
        domain=DOMAIN,
        purpose="train",
        episodes=(),
        completions=tuple(
            ScoredCompletion(
                completion_id=f"{index:032x}",
                offset=index,
                episode_index=0,
                sequence=index,
                return_to_go=1.0,
                advantage=0.5,
            )
            for index in range(completions)
        ),
    )


def steps_of(groups: int) -> SyntheticRun:
    """Steps of so many groups, and as many groups beside each that are too stale to train."""
    run = SyntheticRun()
    for step in range(STEPS):
        first = step * 2 * groups
        for number in range(first, first + 2 * groups):
            run.put(SCORED_GROUPS, scored(number, completions=3))
        for number in range(first + groups, first + 2 * groups):
            run.retire(f"g-{number}", reason="stale")
        run.train(step, [scheduled(first + index, version=step) for index in range(groups)])
    return run


def book_of(messages: list[Message]) -> StepBook:
    book = StepBook()
    for message in messages:
        book.apply(message)
    return book


def test_steps_of_many_groups_are_held_in_as_many_objects_as_steps_of_few():
    few, many = (book_of(steps_of(groups).messages) for groups in (2, 40))
    assert held_objects(many) < held_objects(few) + STEPS
    assert sum(each.groups for each in many.trained_groups()) == STEPS * 40


@pytest.mark.parametrize("first", [SCORED_GROUPS.name, TRAINED_STEPS.name])
def test_a_step_has_the_completions_of_its_groups_whichever_topic_is_read_first(first: str):
    run = steps_of(2)
    book = book_of(sorted(run.messages, key=lambda message: message.topic != first))
    assert [point.samples for point in book.points()] == [6] * STEPS


def test_a_step_that_is_trained_again_has_the_completions_of_its_groups_once():
    run = steps_of(2)
    run.step_done(STEPS - 1, [scheduled(4 * STEPS - 4 + i, version=0) for i in (0, 1)], lineage=2)
    assert [point.samples for point in book_of(run.messages).points()] == [6] * STEPS


def test_scores_that_are_read_before_their_admissions_hold_none_of_their_completions():
    few, many = GroupBook(), GroupBook()
    for book, completions in ((few, 3), (many, 300)):
        run = SyntheticRun()
        for number in range(STEPS):
            run.put(SCORED_GROUPS, scored(number, completions=completions))
        for message in run.messages:
            book.apply(message)
    assert held_objects(many) == held_objects(few)


def engines_after(completions: int) -> EngineBook:
    """A completion of two tokens each second, of one group, and nobody asks for the rate."""
    run, book = SyntheticRun(), EngineBook()
    made = run.completion("g-0", 0, turn=0, version=0, context=[1])
    for second in range(completions):
        message = Message(
            topic=FINISHED_COMPLETIONS.name,
            partition=0,
            offset=second,
            timestamp_ms=1000 * second,
            record=made,
        )
        book.apply(message)
    assert made.output == pack_ids([20, 30, 2])
    return book


def test_completions_that_nobody_looks_at_are_not_held_one_by_one():
    hours = engines_after(10 * SECONDS_KEPT_MAX)
    assert held_objects(hours) <= held_objects(engines_after(2 * SECONDS_KEPT_MAX)) + 1_000
    now_ms = 1000 * (10 * SECONDS_KEPT_MAX - 1)
    assert hours.tokens_per_s(now_ms=now_ms) == pytest.approx(3, rel=0.1)
    assert hours.tokens_per_s(now_ms=now_ms + 2 * RATE_SPAN_MS) == 0


def calls_of(look: Callable[[], object]) -> int:
    """Python functions that are called meanwhile."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        look()
    finally:
        sys.setprofile(None)
    return calls


def test_whether_a_run_is_trained_is_asked_without_a_look_at_each_step():
    views = [RunView(started(steps=STEPS)) for _ in range(2)]
    for view, messages in zip(views, (SyntheticRun().messages, steps_of(2).messages), strict=True):
        for message in messages:
            view.apply(message)
    looks = [lambda view=view: (view.is_trained, view.groups_open) for view in views]
    assert [look() for look in looks] == [(False, 0), (True, 0)]
    none, all_of_them = map(calls_of, looks)
    assert all_of_them < none + STEPS
