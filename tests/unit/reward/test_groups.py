"""When a group is complete and may train, over all interleavings of its records."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.messages import InvalidRecordError, Tick
from forgemq_contracts.run import Rewards
from forgemq_reward.core import RewardCore
from tests.unit.reward.records import completion_id, finished_episode, graded_episode
from tests.unit.reward.scoring import core_of, feed, retired, score


def test_too_few_scored_episodes_fail_the_group():
    episodes = [
        finished_episode(i, size=6, status="completed" if i < 2 else "aborted") for i in range(6)
    ]
    grades = [graded_episode(0, outcome=1.0), graded_episode(1)]
    failed = score(episodes, grades, group_min_fraction=0.5)
    assert (failed.not_trainable, failed.completions) == ("failed", ())
    assert failed.detail == "2 of 6 episodes scored, 3 are needed"
    assert score(episodes, grades, group_min_fraction=0.3).not_trainable == ""


def test_a_failed_group_quotes_the_reason_of_its_first_masked_episode():
    aborted = msgspec.structs.replace(
        finished_episode(0, size=3, status="aborted"), detail="ValueError: out of words"
    )
    episodes = [aborted, finished_episode(1, size=3), finished_episode(2, size=3)]
    unmarked = msgspec.structs.replace(graded_episode(2, is_masked=True), detail="x" * 900)
    grades = [graded_episode(1), unmarked]
    failed = score(episodes, grades, group_min_fraction=1.0)
    assert failed.detail == (
        "1 of 3 episodes scored, 3 are needed; g-1.0.0: ValueError: out of words"
    )
    completed = [finished_episode(0, size=3), *episodes[1:]]
    failed = score(completed, [graded_episode(0), *grades], group_min_fraction=1.0)
    assert failed.detail == f"2 of 3 episodes scored, 3 are needed; g-1.2.0: {'x' * 300}"


@pytest.mark.parametrize(
    ("treatment", "expected"),
    [
        ("grade", [(0, 0.7), (1, -0.3), (2, 0.0), (3, -0.4)]),
        ("zero", [(0, 0.8), (1, -0.2), (2, -0.3), (3, -0.3)]),
        ("mask", [(0, 0.5), (1, -0.5)]),
        ("no_loss", [(0, 0.7), (1, -0.3)]),
    ],
)
def test_an_episode_that_a_limit_ended_earns_what_the_run_says(treatment, expected):
    episodes = [finished_episode(i, size=4) for i in range(4)]
    episodes[2:] = [
        msgspec.structs.replace(one, truncated_by="context_full") for one in episodes[2:]
    ]
    grades = [
        graded_episode(0, outcome=1.1),
        graded_episode(1, outcome=0.1),
        graded_episode(2, outcome=0.3, process=[0.1]),
        graded_episode(3),
    ]
    scored = score(episodes, grades, truncated=treatment)
    assert [(c.episode_index, round(c.advantage, 9)) for c in scored.completions] == expected
    ends = [(one.is_masked, one.truncated_by) for one in scored.episodes]
    end = (treatment == "mask", "context_full")
    assert ends == [(False, None), (False, None), end, end]


@pytest.mark.parametrize(
    ("end", "is_masked"),
    [
        ({"truncated_by": "context_full"}, False),
        ({"truncated_by": "too_many_turns"}, False),
        ({"truncated_by": "turn_too_long"}, False),
        ({"truncated_by": "out_of_time"}, False),
        ({"truncated_by": "declared", "detail": "PolicyFailedError: half a plan"}, False),
        ({"status": "aborted", "detail": "LookupError: no such shelf"}, True),
        ({"status": "failed", "detail": "the lease lapsed"}, True),
    ],
    ids=lambda end: str(end),
)
def test_what_the_policy_caused_is_scored_and_what_the_machinery_caused_is_masked(end, is_masked):
    episodes = [finished_episode(i, size=3) for i in range(3)]
    episodes[2] = msgspec.structs.replace(episodes[2], **end)
    grades = [graded_episode(0, outcome=1.0), graded_episode(1)]
    if not is_masked:
        grades.append(graded_episode(2))
    scored = score(episodes, grades)
    assert [one.is_masked for one in scored.episodes] == [False, False, is_masked]
    baseline = 1 / (2 if is_masked else 3)
    assert scored.completions[0].advantage == pytest.approx(1 - baseline)


def test_a_zero_holds_if_no_grader_could_read_how_the_episode_ended():
    episodes = [finished_episode(i) for i in range(2)]
    episodes[1] = msgspec.structs.replace(episodes[1], truncated_by="turn_too_long")
    grades = [graded_episode(0, outcome=1.0), graded_episode(1, is_masked=True)]
    assert score(episodes, grades, truncated="grade").not_trainable == "failed"
    scored = score(episodes, grades, truncated="zero")
    assert [c.advantage for c in scored.completions] == [0.5, -0.5]


@pytest.mark.parametrize(
    ("treatment", "total"), [("grade", 0.3), ("zero", 0.0), ("mask", 0.3), ("no_loss", 0.3)]
)
def test_an_evaluated_episode_that_a_limit_ended_counts_whatever_training_makes_of_it(
    treatment, total
):
    episode = finished_episode(0, size=1, purpose="eval", truncated_by="context_full")
    scored = score([episode], [graded_episode(0, outcome=0.3)], truncated=treatment)
    assert [(one.is_masked, one.total) for one in scored.episodes] == [(False, total)]


def test_a_group_that_fails_because_its_episodes_were_truncated_says_so():
    episodes = [
        msgspec.structs.replace(finished_episode(i), truncated_by="context_full") for i in range(2)
    ]
    failed = score(episodes, [graded_episode(0), graded_episode(1)], truncated="mask")
    assert failed.detail == (
        "0 of 2 episodes scored, 2 are needed; "
        "g-1.0.0: truncated by context_full, which rewards.truncated masks"
    )


def test_a_group_of_truncated_episodes_without_loss_says_why_nothing_trains():
    episodes = [
        msgspec.structs.replace(finished_episode(i), truncated_by="context_full") for i in range(2)
    ]
    grades = [graded_episode(0, outcome=1.0), graded_episode(1)]
    scored = score(episodes, grades, truncated="no_loss")
    assert (scored.not_trainable, scored.completions) == ("zero_variance", ())
    assert scored.detail == "every scored episode was truncated, and rewards.truncated is no_loss"
    assert [one.is_masked for one in scored.episodes] == [False, False]


def test_a_group_whose_agent_asked_for_no_completion_fails_whatever_its_episodes_earned():
    episodes = [finished_episode(index, size=3, turns=0) for index in range(2)]
    episodes.append(finished_episode(2, size=3, status="failed"))
    grades = [graded_episode(0, outcome=1.0), graded_episode(1)]
    scored = score(episodes, grades)
    assert (scored.not_trainable, scored.completions) == ("failed", ())
    assert scored.detail == (
        "no scored episode has a completion: their agent asked the gateway for none, or was refused"
    )


def test_with_a_teacher_a_group_of_equal_returns_trains_too():
    records = [finished_episode(0), finished_episode(1), graded_episode(0), graded_episode(1)]
    core = RewardCore(partition=3, rewards=Rewards(), has_teacher=True)
    [scored] = feed(core, records)
    assert scored.not_trainable == ""
    assert [completion.advantage for completion in scored.completions] == [0.0, 0.0]
    [without] = feed(core_of(), records)
    assert without.not_trainable == "zero_variance"


def test_two_episodes_are_the_least_whatever_the_fraction():
    episodes = [finished_episode(0), finished_episode(1, status="failed")]
    scored = score(episodes, [graded_episode(0, outcome=1.0)], group_min_fraction=0.1)
    assert scored.not_trainable == "failed"


def test_evaluation_groups_end_evaluated_with_scores_and_without_completions():
    scored = score([finished_episode(0, size=1, purpose="eval")], [graded_episode(0, outcome=1.0)])
    assert (scored.not_trainable, scored.purpose, scored.completions) == ("evaluated", "eval", ())
    assert scored.episodes[0].outcome == 1.0
    [nothing] = feed(core_of(), [finished_episode(0, size=1, purpose="eval", status="failed")])
    assert (nothing.not_trainable, nothing.episodes[0].is_masked) == ("evaluated", True)


# When a group is complete.


def test_the_first_end_of_an_index_counts_and_needs_its_own_grade():
    core = core_of()
    records = [
        finished_episode(0, attempt=1),
        finished_episode(0, attempt=0),
        finished_episode(1),
        graded_episode(1),
        graded_episode(0, attempt=0, outcome=9.0),
    ]
    assert feed(core, records) == []
    [scored] = feed(core, [graded_episode(0, attempt=1, outcome=1.0)])
    assert [episode.episode_id for episode in scored.episodes] == ["g-1.0.1", "g-1.1.0"]
    assert scored.episodes[0].outcome == 1.0


def test_the_first_grade_of_an_episode_counts():
    records = [finished_episode(0), graded_episode(0, outcome=1.0), graded_episode(0, outcome=5.0)]
    [scored] = feed(core_of(), [*records, finished_episode(1), graded_episode(1)])
    assert scored.episodes[0].outcome == 1.0


def test_a_retired_group_is_dropped_and_never_scored():
    core = core_of()
    records = [finished_episode(0), graded_episode(0), retired(), finished_episode(1)]
    assert feed(core, [*records, graded_episode(1)]) == []
    assert core.snapshot() == core_with_retired().snapshot()


def core_with_retired() -> RewardCore:
    core = core_of()
    feed(core, [retired()])
    return core


def test_an_index_beyond_the_group_is_a_bad_record():
    core = core_of()
    before = core.snapshot()
    with pytest.raises(InvalidRecordError, match="index 2 in a group of 2"):
        feed(core, [finished_episode(2)])
    assert core.snapshot() == before
    feed(core, [finished_episode(0)])
    with pytest.raises(InvalidRecordError, match="says G=3, its group says G=2"):
        feed(core, [finished_episode(1, size=3)])


def test_time_changes_nothing():
    core = core_of()
    before = core.snapshot()
    assert core.handle(Tick(run_ms=1000)) == ()
    assert core.snapshot() == before


# Properties.


def history() -> list[msgspec.Struct]:
    """Three groups: one scored, one failed, one evaluated."""
    records: list[msgspec.Struct] = []
    for group, purpose in (("g-1", "train"), ("g-2", "train"), ("g-3", "eval")):
        for index in range(3):
            status = "failed" if group == "g-2" and index else "completed"
            records.append(
                finished_episode(
                    index, group=group, size=3, turns=2, status=status, purpose=purpose
                )
            )
            if status == "completed":
                records.append(
                    graded_episode(
                        index, group=group, outcome=float(index), process=[0.1 * index, -0.2]
                    )
                )
    return records


@given(st.permutations(history()), st.data())
@pytest.mark.slow
def test_no_order_repetition_or_restart_changes_what_is_scored(records, data):
    core, scored = core_of(), []
    for place, record in enumerate(records):
        scored += feed(core, [record])
        if data.draw(st.integers(0, 3)) == 0:
            assert feed(core, [records[data.draw(st.integers(0, place))]]) == []
        if data.draw(st.integers(0, 3)) == 0:
            restored = core_of()
            restored.restore(core.snapshot())
            assert restored.snapshot() == core.snapshot()
            core = restored
    expected = feed(core_of(), history())
    assert sorted(scored, key=lambda s: s.group_id) == expected
    assert [s.not_trainable for s in expected] == ["", "failed", "evaluated"]
    assert expected[0].completions[0].completion_id == completion_id(0, 0)
