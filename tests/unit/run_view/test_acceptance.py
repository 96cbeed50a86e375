"""Drafted tokens that held, by version, and the alarm when they stop to."""

import msgspec
import pytest

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import FinishedCompletion, WeightSpan
from forgemq_contracts.messages import Message
from forgemq_run_view.acceptance import VERIFICATIONS_MIN
from forgemq_run_view.state import RunState
from forgemq_run_view.view import RunView
from tests.unit.run_view.synthetic import SyntheticRun, started


def drafted(message: Message, *, tokens: int, passes: int, version: int, **more: object) -> Message:
    record = message.record
    assert isinstance(record, FinishedCompletion)
    changed = msgspec.structs.replace(
        record,
        output=pack_ids(range(tokens)),
        logprobs=pack_floats([-0.5] * tokens),
        spans=(WeightSpan(start=0, end=tokens, lineage=1, version=version),),
        verifications=passes,
        **more,
    )
    return msgspec.structs.replace(message, record=changed)


@pytest.fixture
def completion() -> Message:
    messages = SyntheticRun().play(steps=1).messages
    return next(each for each in messages if isinstance(each.record, FinishedCompletion))


def state_of(*messages: Message) -> RunState:
    view = RunView(started())
    for message in messages:
        view.apply(message)
    return view.state(now_ms=1)


def test_the_length_is_tokens_a_pass_without_those_of_a_prefill(completion: Message) -> None:
    state = state_of(
        drafted(completion, tokens=13, passes=4, version=1),
        drafted(completion, tokens=8, passes=5, version=1, retractions=1),
        drafted(completion, tokens=5, passes=4, version=2),
    )
    assert [(p.version, p.length, p.verifications) for p in state.acceptance] == [
        (1, 2.0, 9),
        (2, 1.0, 4),
    ]


def test_a_run_without_speculation_and_completions_of_two_versions_have_no_point(
    completion: Message,
) -> None:
    both = drafted(completion, tokens=6, passes=3, version=1)
    spans = (
        WeightSpan(start=0, end=2, lineage=1, version=1),
        WeightSpan(start=2, end=6, lineage=1, version=2),
    )
    both = msgspec.structs.replace(both, record=msgspec.structs.replace(both.record, spans=spans))
    assert state_of(completion, both).acceptance == ()


@pytest.mark.parametrize(
    ("before", "after", "passes", "is_raised"),
    [
        (2.0, 1.05, VERIFICATIONS_MIN, True),
        (2.0, 1.2, VERIFICATIONS_MIN, False),
        (1.0, 1.05, VERIFICATIONS_MIN, False),
        (2.0, 1.05, VERIFICATIONS_MIN - 1, False),
    ],
    ids=["fell", "holds", "never-held", "too-few"],
)
def test_an_alarm_is_raised_once_guesses_stop_to_hold(
    completion: Message, before: float, after: float, passes: int, is_raised: bool
) -> None:
    state = state_of(
        *(
            drafted(completion, tokens=1 + round(length * passes), passes=passes, version=version)
            for version, length in ((3, before), (4, after))
        )
    )
    raised = [(a.step, a.lineage, a.metric, a.side, a.threshold) for a in state.alarms]
    assert raised == ([(4, 1, "acceptance_length", "below", 1.1)] if is_raised else [])
    if is_raised:
        assert state.alarms[0].value == pytest.approx(1.05)
