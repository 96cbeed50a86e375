"""The live state of a run from its records."""

import itertools
import random

import msgspec
import pytest

from forgemq_contracts.groups import AdmittedGroup, EpisodeScore, ScoredGroup
from forgemq_contracts.run import EndedRun
from forgemq_contracts.topics import (
    ADMITTED_GROUPS,
    ENDED_RUNS,
    REPORTED_ENGINES,
    SCORED_GROUPS,
    STARTED_RUNS,
    TRAINED_STEPS,
)
from forgemq_run_view.state import RunState
from forgemq_run_view.view import RunView
from tests.unit.run_view.synthetic import DOMAIN, SyntheticRun, metrics, started


def state_of(messages, *, now_ms: int = 20_000) -> RunState:
    view = RunView(started())
    for message in messages:
        view.apply(message)
    return view.state(now_ms=now_ms)


@pytest.fixture
def run() -> SyntheticRun:
    return SyntheticRun().play(steps=2)


def test_counts_of_a_played_run(run):
    state = state_of(run.messages)
    assert (state.steps_trained, state.steps, state.version) == (2, 3, 2)
    assert (state.groups_admitted, state.groups_open) == (4, 0)
    assert [(each.reason, each.groups) for each in state.retired] == [("trained", 4)]
    assert (state.completions, state.tokens_generated, state.tokens_trained) == (16, 48, 200)
    assert state.episodes_finished == 8


def test_merge_ratios_are_sums_over_steps_and_not_means_of_ratios(run):
    state = state_of(run.messages)
    assert (state.merge_ratio_per_request, state.merge_ratio_append) == (3.0, 1.5)


def test_the_order_in_which_topics_are_read_changes_nothing(run):
    run.admit("g-4", index=4, version=2)
    run.episode("g-4", 0, version=2)
    expected = state_of(run.messages)
    for seed in range(5):
        shuffled = list(run.messages)
        random.Random(seed).shuffle(shuffled)
        assert msgspec.structs.replace(state_of(shuffled), tokens_per_s=0.0) == (
            msgspec.structs.replace(expected, tokens_per_s=0.0)
        )


def test_a_lane_is_shown_as_it_last_reported_also_if_its_clock_was_set_back(run):
    report = next(m.record for m in reversed(run.messages) if m.topic == REPORTED_ENGINES.name)
    hour_ms = 3_600_000
    for at_ms, running in ((5 * hour_ms, 7), (4 * hour_ms, 2)):
        run.put(
            REPORTED_ENGINES,
            msgspec.structs.replace(report, running=running, reported_ms=at_ms),
        )
    [engine] = state_of(run.messages).engines
    assert (engine.running, engine.reported_ms) == (2, 4 * hour_ms)


def test_staleness_is_shown_by_queue_of_the_newest_step_and_counted_over_all(run):
    groups = [run.generate(index, version=1) for index in (4, 5)]
    run.train(2, groups)
    state = state_of(run.messages)
    [queue] = state.queues
    assert queue.staleness == 1
    counted = {(t.domain, t.staleness): t.groups for t in state.trained}
    assert counted == {(DOMAIN, 0): 4, (DOMAIN, 1): 2}


def test_success_is_counted_under_the_version_at_admission(run):
    versions = state_of(run.messages).versions
    assert [(point.version, point.tally.success) for point in versions] == [(0, 0.5), (1, 1.0)]
    assert versions[0].tally.reward == pytest.approx(0.9)
    assert versions[0].tally.episodes == 4


def test_a_version_counts_once_half_as_many_episodes_have_ended_as_a_step_trains(run):
    settled = state_of(run.messages).versions
    for index in (5, 6, 7):
        run.admit(f"g-{index}", index=index, version=3)
    scores = [
        EpisodeScore(episode_id=f"e-{i}", outcome=0, speed=0, process=0, total=0) for i in "ab"
    ]
    for group_id, ended in (("g-5", scores[:1]), ("g-6", scores[1:])):
        assert state_of(run.messages).versions == settled
        scored = ScoredGroup(
            group_id=group_id, domain=DOMAIN, purpose="train", episodes=tuple(ended)
        )
        run.put(SCORED_GROUPS, scored)
    newest = state_of(run.messages).versions[-1]
    assert (newest.version, newest.tally.episodes, newest.tally.success) == (3, 2, 0.0)


def test_masked_episodes_count_nowhere():
    run = SyntheticRun()
    run.admit("g-0", index=0, version=0)
    scores = [
        EpisodeScore(episode_id=f"g-0.{i}.0", outcome=1, speed=0, process=0, total=1)
        for i in range(2)
    ]
    scores.append(
        EpisodeScore(episode_id="g-0.2.0", outcome=0, speed=0, process=0, total=0, is_masked=True)
    )
    scored = ScoredGroup(group_id="g-0", domain=DOMAIN, purpose="train", episodes=tuple(scores))
    run.put(SCORED_GROUPS, scored)
    tally = state_of(run.messages).versions[0].tally
    assert (tally.episodes, tally.success) == (2, 1.0)


def test_the_head_is_the_oldest_group_not_taken_and_the_window_skips_groups_retired_untrained():
    run = SyntheticRun()
    groups = [run.generate(index, version=0) for index in range(2)]
    run.schedule(0, groups)
    for index in range(2, 6):
        run.admit(f"g-{index}", index=index, version=0)
    run.retire("g-3", reason="failed")
    queue = state_of(run.messages).queues[0]
    assert queue.head == 2
    assert [each.queue_index for each in queue.positions if each.is_in_window] == [2, 4]
    assert [each.position for each in queue.positions] == [
        *["scheduled"] * 2,
        "playing",
        "retired",
        *["playing"] * 2,
    ]
    assert (queue.in_flight, queue.waiting) == (5, 0)


def test_a_repeated_step_of_a_new_lineage_replaces_the_old_one(run):
    old = next(m.record for m in run.of(TRAINED_STEPS) if m.record.step == 1)
    new = msgspec.structs.replace(old, lineage=2, metrics=metrics(loss=9.0))
    run.put(TRAINED_STEPS, new)
    points = state_of(run.messages).points
    assert [(point.step, point.lineage, point.loss) for point in points] == [
        (0, 1, 0.5),
        (1, 2, 9.0),
    ]


def evaluate(run: SyntheticRun, name: str, *, version: int, temperature: float, outcomes) -> None:
    for number, outcome in enumerate(outcomes):
        group_id = f"e-{name}-{number}"
        asked = {"group_id": group_id, "domain": DOMAIN, "purpose": "eval"}
        run.put(
            ADMITTED_GROUPS,
            AdmittedGroup(
                **asked,
                group_size=1,
                task=b"{}",
                version_at_admission=version,
                temperature=temperature,
                round_name=name,
            ),
        )
        score = EpisodeScore(
            episode_id=f"{group_id}.0.0", outcome=outcome, speed=0, process=0, total=outcome
        )
        run.put(
            SCORED_GROUPS,
            ScoredGroup(**asked, episodes=(score,), not_trainable="evaluated", round_name=name),
        )


def test_evaluation_rounds_are_apart_from_training_and_from_one_another(run):
    evaluate(run, "start-sampled", version=0, temperature=1.0, outcomes=[1, 0, 0, 0])
    evaluate(run, "start-greedy", version=0, temperature=0.0, outcomes=[1, 1, 0, 0])
    evaluate(run, "end-sampled", version=3, temperature=1.0, outcomes=[1, 1, 1, 0])
    state = state_of(run.messages)
    found = {
        (each.round_name, each.is_greedy): (each.tally.success, each.groups_ended)
        for each in state.evaluations
    }
    assert found == {
        ("start-sampled", False): (0.25, 4),
        ("start-greedy", True): (0.5, 4),
        ("end-sampled", False): (0.75, 4),
    }
    assert [point.tally.episodes for point in state.versions] == [4, 4]
    assert (state.queues[0].in_flight, state.groups_open) == (0, 12)


def test_a_round_has_the_versions_that_sampled_it_and_none_before_its_first_completion(run):
    evaluate(run, "played", version=1, temperature=1.0, outcomes=[1])
    asked = AdmittedGroup(
        group_id="g-90",
        domain=DOMAIN,
        purpose="eval",
        group_size=2,
        task=b"{}",
        version_at_admission=1,
        temperature=1.0,
        round_name="begun",
    )
    run.put(ADMITTED_GROUPS, asked)
    begun = state_of(run.messages).evaluations
    for episode, version in enumerate((3, 4)):
        run.completion("g-90", episode, turn=0, version=version, context=[1])
    sampled = state_of(run.messages).evaluations[0]
    assert {(each.version_min, each.version_max, each.versions) for each in begun} == {
        (None, None, "")
    }
    assert (sampled.round_name, sampled.version_min, sampled.version_max) == ("begun", 3, 4)
    assert sampled.versions == "3-4"


def test_tokens_per_second_are_those_of_the_last_twenty_seconds(run):
    last_ms = max(message.timestamp_ms for message in run.messages)
    assert state_of(run.messages, now_ms=last_ms).tokens_per_s == pytest.approx(48 / 20)
    assert state_of(run.messages, now_ms=last_ms + 60_000).tokens_per_s == 0


def test_the_end_of_an_earlier_start_is_not_the_end_of_this_one(run):
    for at_ms, expected in ((500, ""), (1_500, "completed")):
        end = EndedRun(run="r", reason="completed", ended_ms=at_ms)
        run.put(ENDED_RUNS, end)
        assert state_of(run.messages).ended == expected


def test_a_run_that_is_resumed_while_somebody_looks_is_up_again_until_that_start_ends(run):
    again = msgspec.structs.replace(started(), started_ms=4_000)
    seen = []
    for topic, record in (
        (ENDED_RUNS, EndedRun(run="r", reason="interrupted", ended_ms=3_000)),
        (STARTED_RUNS, started()),
        (STARTED_RUNS, again),
        (ENDED_RUNS, EndedRun(run="r", reason="completed", ended_ms=5_000)),
    ):
        run.put(topic, record)
        state = state_of(run.messages)
        seen.append((state.ended, state.started_ms))
    first = started().started_ms
    assert seen == [("interrupted", first)] * 2 + [("", 4_000), ("completed", 4_000)]


def test_another_runs_end_is_not_ours(run):
    run.put(ENDED_RUNS, EndedRun(run="other", reason="failed", ended_ms=9_000))
    assert state_of(run.messages).ended == ""


def test_every_prefix_of_the_log_has_a_state(run):
    view = RunView(started())
    for count, message in zip(itertools.count(1), run.messages, strict=False):
        view.apply(message)
        state = view.state(now_ms=20_000)
        assert sum(each.records for each in state.services) == count
        assert state.groups_open == state.groups_admitted - sum(e.groups for e in state.retired)
