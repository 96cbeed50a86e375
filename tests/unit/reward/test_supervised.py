"""Finished conversations that train: an advantage of 1 for each reply, whatever they earned."""

import msgspec
import pytest

from tests.unit.reward.records import completion_id, finished_episode, graded_episode
from tests.unit.reward.scoring import score


def conversation(**changes: object):
    made = finished_episode(0, size=1, turns=2)
    return msgspec.structs.replace(made, source="import", **changes)


@pytest.mark.parametrize(
    ("grade", "is_masked", "returned"),
    [
        (graded_episode(0, outcome=0.5), False, 0.5),
        (graded_episode(0, is_masked=True), True, 0.0),
    ],
    ids=["rated", "without an outcome"],
)
def test_each_reply_of_a_conversation_has_the_advantage_one(grade, is_masked, returned):
    scored = score([conversation()], [grade])
    assert (scored.not_trainable, scored.episodes[0].is_masked) == ("", is_masked)
    assert [
        (c.completion_id, c.sequence, c.return_to_go, c.advantage) for c in scored.completions
    ] == [(completion_id(0, turn), turn, returned, 1.0) for turn in range(2)]


def test_a_conversation_that_is_only_kept_is_scored_as_before():
    scored = score([conversation(purpose="eval")], [graded_episode(0, outcome=0.5)])
    assert (scored.not_trainable, scored.completions) == ("evaluated", ())


def test_a_conversation_that_was_not_read_fails_with_the_reason_and_is_no_reward_of_zero():
    lost = score([conversation(status="failed", detail="the lease lapsed")], [])
    assert (lost.not_trainable, lost.completions) == ("failed", ())
    assert lost.detail == "the conversation was not read; g-1.0.0: the lease lapsed"
    empty = score([conversation(manifest=())], [graded_episode(0, outcome=0.5)])
    assert empty.detail == "the conversation was not read; it has no reply"
