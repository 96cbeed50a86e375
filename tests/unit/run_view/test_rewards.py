"""What turns and episodes earned, beside their tokens."""

import io

import msgspec
import pytest
from rich.console import Console

from forgemq_contracts.episodes import GradedEpisode, ProcessReward
from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_launcher.commands.inspection import print_trajectory
from forgemq_run_view.rewards import EpisodeReward, TurnReward
from forgemq_run_view.trajectory import Trajectory, trajectories
from forgemq_run_view.view import RunView
from tests.unit.run_view.synthetic import SyntheticRun, started


def message(record: msgspec.Struct, *, offset: int = 0) -> Message:
    return Message(
        topic="graded-episodes-v1", partition=0, offset=offset, timestamp_ms=0, record=record
    )


@pytest.fixture
def records() -> list[Message]:
    """All records of one group of two episodes with two turns each; the first turn cost 0.2."""
    run = SyntheticRun().play(steps=1)
    found = [m for m in run.messages if getattr(m.record, "group_id", "") == "g-0"]
    [scored] = [m.record for m in found if isinstance(m.record, ScoredGroup)]
    grade = GradedEpisode(
        episode_id="g-0.1.0",
        group_id="g-0",
        grader="m:f",
        grader_version="1",
        outcome=1.0,
        speed=0.5,
        process=(ProcessReward(completion_id=scored.completions[2].completion_id, value=-0.2),),
    )
    repeated = msgspec.structs.replace(grade, process=())
    return [*found, message(grade, offset=7), message(repeated, offset=9)]


def shown(trajectory: Trajectory) -> str:
    out = io.StringIO()
    print_trajectory(trajectory, None, Console(file=out, width=400))
    return out.getvalue()


def test_a_turn_shows_its_reward_its_return_and_its_advantage(records):
    _, second = trajectories(records)
    first_turn, last_turn = second.turns
    assert first_turn.reward == TurnReward(process=-0.2, return_to_go=1.0, advantage=-0.3)
    assert last_turn.reward == TurnReward(return_to_go=1.0, advantage=-0.3)
    assert second.reward == EpisodeReward(
        outcome=1.0,
        speed=0.5,
        process=-0.1,
        total=1.4,
        is_masked=False,
        truncated_by="",
        detail="",
    )
    text = shown(second)
    assert "outcome 1, speed 0.5, process -0.1, total 1.4\n" in text
    assert "s); reward -0.2, return-to-go +1, advantage -0.3\n" in text
    assert "s); return-to-go +1, advantage -0.3\n" in text


def test_a_reward_of_minus_zero_is_shown_without_a_minus(records):
    """-0.1 for each of no malformed calls is -0.0."""
    _, second = trajectories(records)
    free = TurnReward(process=-0.0, return_to_go=1.0, advantage=-0.0)
    turns = [msgspec.structs.replace(turn, reward=free) for turn in second.turns]
    reward = msgspec.structs.replace(second.reward, process=-0.0)
    text = shown(msgspec.structs.replace(second, turns=turns, reward=reward))
    assert "speed 0.5, process 0, total" in text
    assert "s); reward +0, return-to-go +1, advantage +0\n" in text


def test_an_episode_that_does_not_train_says_why(records):
    [scored] = [m.record for m in records if isinstance(m.record, ScoredGroup)]
    masked = msgspec.structs.replace(
        scored.episodes[0], is_masked=True, truncated_by="context_full"
    )
    failed = msgspec.structs.replace(
        scored,
        episodes=(masked, scored.episodes[1]),
        completions=(),
        not_trainable="failed",
        detail="1 of 2 episodes scored",
    )
    others = [m for m in records if not isinstance(m.record, ScoredGroup)]
    first, _ = trajectories([*others, message(failed)])
    assert first.turns[0].reward == TurnReward()
    said = "masked; truncated by context_full; failed: 1 of 2 episodes scored\n"
    assert said in shown(first)
    assert "advantage" not in shown(first)
    unscored, _ = trajectories(others)
    assert unscored.reward is None
    assert "not scored\n" in shown(unscored)


def test_the_view_knows_where_the_grades_and_the_score_of_a_group_are(records):
    view = RunView(started())
    for each in records:
        view.apply(each)
    known = view.record_offsets("g-0")
    offsets = [(m.topic, m.partition, m.offset) for m in records if m.topic == "graded-episodes-v1"]
    assert len(offsets) == 2
    assert known[-2:] == tuple(offsets)
    kinds = [topic for topic, _, _ in known]
    assert kinds.count("finished-completions-v1") == 4
    assert kinds.count("scored-groups-v1") == 1
