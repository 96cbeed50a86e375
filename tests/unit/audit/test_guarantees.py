"""A broken guarantee is found broken, and one that holds is found to hold."""

import random

import msgspec
import pytest

from forgemq_contracts.arrays import pack_floats, pack_ids, unpack_ids
from forgemq_contracts.run import Rewards
from forgemq_contracts.topics import (
    ADMITTED_GROUPS,
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    MERGED_TREES,
    RETIRED_GROUPS,
    SCHEDULED_STEPS,
    SCORED_GROUPS,
    TRAINED_STEPS,
)
from tests.unit.audit.verdicts import audited, broken
from tests.unit.reward.records import graded_episode
from tests.unit.reward.scoring import score
from tests.unit.run_view.synthetic import SyntheticRun, configuration, metrics


@pytest.fixture
def run() -> SyntheticRun:
    return SyntheticRun().play(steps=3)


def test_a_sound_run_holds_every_guarantee_and_says_what_was_checked(run):
    verdicts = audited(run.messages)
    assert broken(verdicts) == set()
    assert verdicts["G1"].checked == "6 groups admitted, 6 retired, 0 open"
    assert verdicts["G2"].checked == "3 steps, 6 groups, 24 samples"
    assert verdicts["G4"].checked == "24 samples against the log"


def test_the_order_in_which_topics_are_read_changes_no_verdict(run):
    shuffled = list(run.messages)
    random.Random(5).shuffle(shuffled)
    assert audited(shuffled) == audited(run.messages)


def test_a_record_read_twice_changes_no_verdict(run):
    assert audited([*run.messages, *run.messages]) == audited(run.messages)


def test_a_group_retired_twice_breaks_g1(run):
    run.retire("g-1", reason="failed")
    assert broken(audited(run.messages)) == {"G1"}


def test_a_group_never_retired_breaks_g1_once_the_run_has_ended(run):
    run.admit("g-6", index=6, version=3)
    assert broken(audited(run.messages, is_ended=False)) == set()
    assert broken(audited(run.messages)) == {"G1"}


def test_a_gap_in_the_queue_breaks_g1(run):
    run.admit("g-9", index=9, version=3)
    run.retire("g-9", reason="cancelled")
    assert broken(audited(run.messages)) == {"G1"}


def test_a_group_called_trained_that_was_not_breaks_g1(run):
    run.admit("g-6", index=6, version=3)
    run.retire("g-6", reason="trained", step=2)
    assert broken(audited(run.messages)) == {"G1"}


def test_an_admission_written_twice_breaks_g1(run):
    run.put(ADMITTED_GROUPS, next(run.of(ADMITTED_GROUPS)).record)
    assert broken(audited(run.messages)) == {"G1"}


def test_a_group_trained_in_two_steps_breaks_g2(run):
    def again(step):
        return msgspec.structs.replace(step, group_ids=(*step.group_ids[:1], "g-0"))

    assert "G2" in broken(audited(run.changed(TRAINED_STEPS, again)))


def test_a_scheduled_group_that_was_not_trained_breaks_g2(run):
    def lost(step):
        return msgspec.structs.replace(step, group_ids=step.group_ids[1:])

    verdicts = audited(run.changed(TRAINED_STEPS, lost), is_ended=False)
    assert any("lost ['g-0']" in text for text in verdicts["G2"].violations)


def test_a_failed_tree_is_accounted_for_and_not_lost(run):
    def failed(step):
        first, *rest = step.group_ids
        return msgspec.structs.replace(step, group_ids=tuple(rest), failed_group_ids=(first,))

    def retired(group):
        is_first = int(group.group_id.removeprefix("g-")) % 2 == 0
        return msgspec.structs.replace(group, reason="failed") if is_first else group

    run.messages = run.changed(TRAINED_STEPS, failed)
    assert broken(audited(run.changed(RETIRED_GROUPS, retired))) == set()


def test_a_missing_step_breaks_g2(run):
    def without(step):
        return None if step.step == 1 else step

    assert "G2" in broken(audited(run.changed(TRAINED_STEPS, without)))


def test_a_group_staler_than_the_limit_breaks_g3(run):
    def stale(step):
        groups = tuple(
            msgspec.structs.replace(group, version_min=0, staleness=step.step + 3)
            for group in step.groups
        )
        return msgspec.structs.replace(step, groups=groups)

    assert "G3" in broken(audited(run.changed(SCHEDULED_STEPS, stale)))


def test_a_schedule_that_names_a_newer_version_than_the_tree_breaks_g3(run):
    def younger(step):
        groups = tuple(
            msgspec.structs.replace(group, version_min=step.step + 1, staleness=0)
            for group in step.groups
        )
        return msgspec.structs.replace(step, groups=groups)

    assert "G3" in broken(audited(run.changed(SCHEDULED_STEPS, younger)))


@pytest.mark.parametrize(
    ("field", "value", "violation"),
    [
        ("output", pack_ids([1, 1, 1]), "tokens"),
        ("context", pack_ids([4]), "tokens"),
        ("logprobs", pack_floats([-0.25, -0.5, -0.25]), "log-probabilities"),
        ("temperature", 0.7, "temperature"),
        ("support", "top_p", "support"),
    ],
)
def test_a_sample_that_is_not_what_the_engine_sampled_breaks_g4(run, field, value, violation):
    def altered(completion):
        is_one = completion.episode_id == "g-2.1.0" and completion.turn.sequence == 1
        changes = {field: value} if is_one else {}
        return msgspec.structs.replace(completion, **changes)

    verdicts = audited(run.changed(FINISHED_COMPLETIONS, altered))
    assert broken(verdicts) == {"G4"}
    assert violation in verdicts["G4"].violations[0]


def test_a_tree_with_one_wrong_token_breaks_g4(run):
    def altered(tree):
        tokens = unpack_ids(tree.tokens)
        tokens[-1] += 1
        return msgspec.structs.replace(tree, tokens=pack_ids(tokens))

    assert "G4" in broken(audited(run.changed(MERGED_TREES, altered)))


def test_a_trained_group_whose_tree_is_missing_is_unknown_and_does_not_hold(run):
    def without_one(tree):
        return None if tree.group_id == "g-3" else tree

    verdicts = audited(run.changed(MERGED_TREES, without_one))
    assert broken(verdicts) == {"G2", "G3", "G4"}
    for name in ("G2", "G3", "G4"):
        assert verdicts[name].violations == ("unknown: the tree of g-3 is not on the log",)


def test_a_sample_lost_between_its_manifest_and_its_score_breaks_g2(run):
    """As if reward had dropped the last completion: scores and tree agree without it."""
    alone = SyntheticRun()
    alone.lost_before_scoring = frozenset({("g-2", 1, 1)})
    verdicts = audited(alone.play(steps=3).messages)
    assert broken(verdicts) == {"G2"}
    (violation,) = verdicts["G2"].violations
    assert violation.startswith("g-2 ")
    assert violation.endswith("is in the manifest of g-2.1.0 and was not scored")


def test_an_episode_that_ended_and_was_not_scored_breaks_g2(run):
    def without_episode(scored):
        if scored.group_id != "g-2":
            return scored
        return msgspec.structs.replace(scored, episodes=scored.episodes[:1])

    verdicts = audited(run.changed(SCORED_GROUPS, without_episode))
    assert broken(verdicts) == {"G2"}
    assert verdicts["G2"].violations == ("g-2 episode g-2.1.0 ended and has no score",)


def with_last_episode(**changes):
    """Changes the score of the second episode of g-2."""

    def changed(scored):
        if scored.group_id != "g-2":
            return scored
        kept, other = scored.episodes
        other = msgspec.structs.replace(other, **changes)
        return msgspec.structs.replace(scored, episodes=(kept, other))

    return changed


def test_a_masked_episode_loses_nothing(run):
    alone = SyntheticRun()
    alone.lost_before_scoring = frozenset({("g-2", 1, 0), ("g-2", 1, 1)})

    masked = with_last_episode(is_masked=True)
    assert broken(audited(alone.play(steps=3).changed(SCORED_GROUPS, masked))) == set()


@pytest.mark.parametrize(("truncated", "expected"), [("no_loss", set()), ("grade", {"G2"})])
def test_an_episode_that_a_limit_ended_loses_nothing_only_if_those_are_to_have_no_loss(
    truncated, expected
):
    alone = SyntheticRun()
    alone.lost_before_scoring = frozenset({("g-2", 1, 0), ("g-2", 1, 1)})

    cut = with_last_episode(truncated_by="context_full")
    messages = alone.play(steps=3).changed(SCORED_GROUPS, cut)
    of = msgspec.structs.replace(configuration(), rewards=Rewards(truncated=truncated))
    assert broken(audited(messages, of=of)) == expected


@pytest.mark.parametrize("truncated", ["grade", "zero", "no_loss"])
def test_what_the_reward_core_leaves_out_of_an_episode_that_a_limit_ended_is_not_lost(truncated):
    def cut(end):
        return msgspec.structs.replace(end, truncated_by="context_full") if end.index else end

    alone = SyntheticRun()
    alone.admit("g-0", index=0, version=0)
    for index in range(2):
        alone.episode("g-0", index, version=0)
    alone.messages[:] = alone.changed(FINISHED_EPISODES, cut)
    grades = [graded_episode(0, group="g-0", outcome=1.0), graded_episode(1, group="g-0")]
    ends = [message.record for message in alone.of(FINISHED_EPISODES)]
    scored = score(ends, grades, truncated=truncated)
    alone.put(SCORED_GROUPS, scored)
    alone.train(0, [alone.merge(scored)], is_last=True)
    of = msgspec.structs.replace(configuration(), rewards=Rewards(truncated=truncated))
    assert broken(audited(alone.messages, of=of)) == set()
    assert len(scored.completions) == (2 if truncated == "no_loss" else 4)


def test_only_the_first_end_of_an_episode_counts(run):
    end = next(m for m in run.of(FINISHED_EPISODES) if m.record.group_id == "g-2")
    late = msgspec.structs.replace(end.record, episode_id="g-2.0.1", attempt=1)
    run.put(FINISHED_EPISODES, late, partition=end.partition)
    assert broken(audited(run.messages)) == set()


def test_a_scored_completion_that_is_neither_in_the_tree_nor_on_the_log_is_unknown(run):
    gone = f"{2:024x}{1:04x}{1:04x}"
    alone = SyntheticRun()
    alone.lost_before_merging = frozenset({gone})

    def without(completion):
        return None if completion.request_id == gone else completion

    verdicts = audited(alone.play(steps=3).changed(FINISHED_COMPLETIONS, without))
    assert broken(verdicts) == {"G2"}
    assert verdicts["G2"].violations == (
        f"unknown: g-2 {gone} was scored and its completion is not on the log",
    )


def test_a_scored_completion_that_is_not_in_the_tree_breaks_g2(run):
    lost = f"{2:024x}{1:04x}{1:04x}"
    alone = SyntheticRun()
    alone.lost_before_merging = frozenset({lost})
    verdicts = audited(alone.play(steps=3).messages)
    assert broken(verdicts) == {"G2"}
    assert verdicts["G2"].violations == (f"g-2 {lost} was scored and is not in the tree",)


@pytest.mark.parametrize(
    ("topic", "violation"),
    [
        (SCORED_GROUPS, "unknown: g-0 its scores are not on the log"),
        (FINISHED_EPISODES, "unknown: g-0 0 of 2 ends of episodes are on the log"),
    ],
)
def test_what_is_not_on_the_log_is_unknown_and_g2_does_not_hold(run, topic, violation):
    verdicts = audited(run.changed(topic, lambda _: None))
    assert broken(verdicts) == {"G2"}
    assert verdicts["G2"].violations[0] == violation


def test_a_gap_above_what_rounding_explains_breaks_g5(run):
    def wide(step):
        return msgspec.structs.replace(step, metrics=metrics(logprob_gap_mean=0.02))

    assert broken(audited(run.changed(TRAINED_STEPS, wide))) == {"G5"}


def test_g5_does_not_hold_if_nothing_was_measured(run):
    def unmeasured(step):
        return msgspec.structs.replace(step, metrics=metrics(gap_entries=0))

    assert broken(audited(run.changed(TRAINED_STEPS, unmeasured))) == {"G5"}


@pytest.mark.parametrize("turn", [0, 1])
def test_turns_under_a_grammar_are_context_without_loss_and_no_gap(turn):
    """The real merger leaves them out of the loss; a half of the samples is left."""
    run = SyntheticRun(constrained_turns=frozenset({turn})).play(steps=3)
    verdicts = audited(run.messages)
    assert broken(verdicts) == set()
    assert verdicts["G2"].checked == "3 steps, 6 groups, 12 samples"
    assert verdicts["G4"].checked == "12 samples against the log"


def test_a_sample_lost_beside_turns_under_a_grammar_breaks_g2():
    run = SyntheticRun(constrained_turns=frozenset({0}))
    run.lost_before_merging = frozenset({name_of(2, 1, 1)})
    verdicts = audited(run.play(steps=3).messages)
    assert broken(verdicts) == {"G2"}
    (violation,) = verdicts["G2"].violations
    assert violation == f"g-2 {name_of(2, 1, 1)} was scored and is not in the tree"


def test_a_turn_under_a_grammar_that_has_no_score_breaks_g2():
    run = SyntheticRun(constrained_turns=frozenset({0}))
    run.lost_before_scoring = frozenset({("g-2", 1, 0)})
    verdicts = audited(run.play(steps=3).messages)
    assert broken(verdicts) == {"G2"}
    assert "was not scored" in verdicts["G2"].violations[0]


def test_a_turn_under_a_grammar_that_is_trained_breaks_g4(run):
    def constrained(completion):
        is_one = completion.episode_id == "g-2.1.0" and completion.turn.sequence == 1
        return msgspec.structs.replace(completion, support="grammar" if is_one else "full")

    verdicts = audited(run.changed(FINISHED_COMPLETIONS, constrained))
    assert broken(verdicts) == {"G4"}
    assert verdicts["G4"].violations[0].endswith("support was grammar, not full")


def name_of(group: int, episode: int, turn: int) -> str:
    return f"{group:024x}{episode:04x}{turn:04x}"
