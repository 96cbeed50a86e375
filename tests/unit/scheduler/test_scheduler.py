"""Admission, steps and retirement, one rule at a time."""

import pytest

from forgemq_contracts import topics
from forgemq_contracts.groups import MergedGroup
from forgemq_contracts.messages import InvalidRecordError
from forgemq_contracts.partitions import group_partition
from forgemq_scheduler.core import SchedulerCore
from tests.unit.scheduler.scene import DEMO, Scene, configuration_of, queue_of, scene_of

# Admission.


def test_nothing_is_admitted_before_a_lane_serves():
    scene = scene_of(lanes_reported=0)
    scene.request(1)
    scene.request(2, purpose="eval")
    scene.load(0, version=0)
    scene.report(0, is_serving=False)
    assert scene.admitted == []
    scene.report(0, version=3)
    assert scene.admitted_ids() == [2, 1]
    assert [group.version_at_admission for group in scene.admitted] == [3, 3]


def test_groups_get_slots_and_queue_indices_in_the_order_of_their_requests():
    scene = scene_of()
    scene.request(*range(20))
    assert scene.admitted_ids() == list(range(12))
    assert [group.queue_index for group in scene.admitted] == list(range(12))
    assert scene.admitted[3].task == b'{"k":3}'
    assert set(scene.places) == {(topics.ADMITTED_GROUPS.name, 0)}


def test_a_group_that_ends_untrained_frees_its_slot_at_once():
    scene = scene_of()
    scene.request(*range(20))
    scene.merge(5, not_trainable="zero_variance")
    scene.merge(7, not_trainable="failed")
    assert scene.ends() == {5: "zero_variance", 7: "failed"}
    assert scene.admitted_ids()[12:] == [12, 13]
    retired = scene.retired[0]
    assert (retired.queue_index, retired.step) == (5, None)
    place = (topics.RETIRED_GROUPS.name, group_partition("g-5", partitions=4))
    assert place in scene.places


def test_a_repeated_request_changes_nothing_whatever_became_of_the_group():
    scene = scene_of()
    scene.request(*range(13))
    scene.merge(0, not_trainable="failed")
    before = scene.core.snapshot()
    scene.request(0, 5, 12)
    assert scene.core.snapshot() == before


def test_a_domain_without_a_queue_is_a_bad_record():
    scene = scene_of()
    before = scene.core.snapshot()
    with pytest.raises(InvalidRecordError, match="domain 'unknown' has no queue"):
        scene.request(1, domain="unknown")
    assert scene.core.snapshot() == before


# Steps.


def test_a_step_takes_oldest_finished_first_and_is_written_when_it_is_full():
    scene = scene_of()
    scene.request(*range(12))
    scene.merge(3, 1, 0, 2, 4)
    assert scene.steps == []
    scene.merge(5)
    assert scene.taken(0) == [3, 1, 0, 2, 4, 5]
    first = scene.steps[0].groups[0]
    assert (first.tree_sha256, first.tree_tokens) == (f"{3:064x}", 13)
    assert (first.partition, first.queue_index) == (3, 3)
    assert scene.steps[0].staleness_bound == 2
    assert (topics.SCHEDULED_STEPS.name, 0) in scene.places


def test_at_most_one_step_is_scheduled_ahead_of_training():
    scene = scene_of(queue_of(slots=18, per_step=6, window=18))
    scene.request(*range(18))
    scene.merge(*range(18))
    assert [step.step for step in scene.steps] == [0, 1]
    scene.train(0)
    assert [step.step for step in scene.steps] == [0, 1, 2]


def test_until_the_last_step_is_scheduled_another_number_of_steps_changes_no_byte():
    """So a run may be resumed with more or fewer steps, and its journal replays to the same."""
    scenes = [scene_of(queue_of(slots=12, per_step=6, window=12), steps=n) for n in (3, 9)]
    for scene in scenes:
        scene.request(*range(24))
        scene.merge(*range(12))
        scene.train(0)
        scene.load(version=1)
    short, long = scenes
    assert [step.step for step in short.steps] == [0, 1]
    assert short.steps == long.steps
    assert short.core.snapshot() == long.core.snapshot()


def test_as_many_slots_as_groups_a_step_are_enough():
    scene = scene_of(queue_of(slots=6, per_step=6, window=2))
    scene.request(*range(18))
    for step in range(3):
        scene.merge(*scene.admitted_ids()[6 * step :], version=step)
        scene.train(step)
        scene.load(version=step + 1)
    assert [scene.taken(step) for step in range(3)] == [
        list(range(first, first + 6)) for first in (0, 6, 12)
    ]


def test_every_queue_gives_its_own_share_to_every_step():
    left = queue_of(slots=4, per_step=2, window=2, domain="left")
    right = queue_of(slots=3, per_step=1, window=1, domain="right")
    scene = scene_of(left, right)
    scene.request(0, 1, 2, 3, domain="left")
    scene.request(10, 11, domain="right")
    scene.merge(0, 1, 2, 3, domain="left")
    assert scene.steps == []
    scene.merge(10, domain="right")
    assert scene.taken(0) == [0, 1, 10]
    assert [group.domain for group in scene.steps[0].groups] == ["left", "left", "right"]
    scene.merge(11, domain="right")
    assert scene.taken(1) == [2, 3, 11]
    assert scene.admitted[-1].queue_index == 1


def test_a_group_over_the_staleness_limit_retires_when_its_turn_comes():
    scene = scene_of(queue_of(slots=12, per_step=6, window=12, staleness_max=1))
    scene.request(*range(20))
    scene.merge(*range(6))
    scene.train(0)
    scene.load(version=1)
    scene.merge(*range(6, 12))
    scene.train(1)
    scene.load(version=2)
    scene.merge(12, version=0)
    assert scene.ends()[12] == "stale"
    assert "version 0 is too old for step 2" in scene.retired[-1].detail
    scene.merge(13, version=1)
    assert 13 not in scene.ends()


def test_a_step_waits_for_weights_rather_than_calling_fresh_groups_stale():
    scene = scene_of(queue_of(slots=12, per_step=6, window=12, staleness_max=0))
    scene.request(*range(12))
    scene.merge(*range(12))
    assert len(scene.steps) == 1
    assert scene.ends() == {}
    scene.train(0)
    assert "stale" not in scene.ends().values()
    scene.load(version=1)
    assert [scene.ends()[n] for n in range(6, 12)] == ["stale"] * 6


def test_the_last_step_says_so_and_nothing_is_scheduled_after_it():
    scene = scene_of(queue_of(slots=6, per_step=2, window=6), steps=2)
    scene.request(*range(6))
    scene.merge(*range(6))
    assert [step.is_last for step in scene.steps] == [False, True]
    scene.train(0)
    assert len(scene.steps) == 2


# Retirement.


ONE = queue_of(slots=1, per_step=1, window=1, group_deadline_s=30.0, claim_deadline_s=900.0)


def test_a_deadline_counts_from_the_first_claim_of_the_group():
    scene = scene_of(ONE)
    scene.request(0)
    scene.tick(600)
    assert (scene.closed, scene.ends()) == ([], {})
    scene.open(0)
    scene.tick(620)
    scene.open(0, index=1)
    scene.open(0, attempt=1)
    scene.tick(629)
    assert scene.closed == []
    scene.tick(630)
    assert (scene.closed, scene.ends()) == (["g-0"], {})


def test_a_group_that_nobody_claims_expires_by_a_deadline_of_that_name():
    scene = scene_of(ONE)
    scene.request(0)
    scene.tick(899)
    assert scene.ends() == {}
    scene.tick(900)
    assert scene.ends() == {0: "expired"}
    assert "no agent claimed an episode within 900 s" in scene.retired[0].detail
    assert scene.closed == []


def test_a_closed_group_trains_with_what_it_has():
    scene = scene_of(ONE)
    scene.request(0)
    scene.open(0)
    scene.tick(31)
    scene.merge(0)
    assert scene.taken(0) == [0]
    scene.train(0)
    assert scene.ends() == {0: "trained"}


@pytest.mark.parametrize(
    ("reason", "end"), [("failed", "expired"), ("zero_variance", "zero_variance")]
)
def test_a_closed_group_with_too_few_finished_episodes_expires(reason, end):
    scene = scene_of(ONE)
    scene.request(0, 1)
    scene.open(0)
    scene.tick(31)
    scene.merge(0, not_trainable=reason)
    assert scene.ends() == {0: end}
    scene.report()
    scene.merge(1, not_trainable="failed")
    assert scene.ends() == {0: end, 1: "failed"}


def test_a_group_past_its_deadline_that_nothing_scores_expires_and_the_queue_moves():
    scene = scene_of(queue_of(slots=4, per_step=2, window=2, group_deadline_s=30.0))
    scene.tick(5)
    scene.request(0, 1, 2, 3)
    scene.open(0, 1, 2, 3)
    scene.merge(1, 2, 3)
    assert scene.steps == []  # 1 is taken; 2 and 3 are outside the window of two
    for second in range(6, 65):
        scene.report()
        scene.tick(second)
    assert (scene.closed, scene.ends()) == (["g-0"], {})
    scene.report()
    scene.tick(65)
    assert scene.ends() == {0: "expired"}
    assert "not scored within another 30 s" in scene.retired[0].detail
    assert scene.taken(0) == [1, 2]


def test_a_group_that_finished_in_time_and_waits_for_its_step_never_expires():
    scene = scene_of(queue_of(slots=4, per_step=2, window=2, group_deadline_s=30.0), ahead=0)
    scene.request(0, 1, 2, 3)
    scene.open(0, 1, 2, 3)
    scene.merge(0, 1, 2)
    scene.tick(31)
    assert scene.closed == ["g-3"], "0 and 1 are taken and 2 has finished"
    scene.tick(61)
    assert scene.ends() == {3: "expired"}


def test_what_comes_of_an_expired_group_afterwards_is_ignored():
    scene = scene_of(ONE)
    scene.request(0)
    scene.tick(900)
    before = scene.core.snapshot()
    scene.open(0)
    scene.merge(0)
    assert (scene.core.snapshot(), scene.steps) == (before, [])


def test_a_claim_of_a_closed_group_gives_it_no_more_time():
    scene = scene_of(ONE)
    scene.request(0)
    scene.open(0)
    scene.tick(31)
    before = scene.core.snapshot()
    scene.open(0, attempt=1)
    assert scene.core.snapshot() == before


def test_a_tree_that_the_trainer_could_not_load_retires_failed_and_holds_its_slot():
    scene = scene_of()
    scene.request(*range(20))
    scene.merge(*range(6))
    scene.train(0, failed=[2])
    assert scene.ends() == {0: "trained", 1: "trained", 2: "failed"} | dict.fromkeys(
        (3, 4, 5), "trained"
    )
    assert len(scene.admitted) == 12
    scene.load(version=1)
    assert len(scene.admitted) == 18


def test_a_step_that_is_trained_again_changes_nothing_but_the_lineage():
    scene = scene_of()
    scene.request(*range(20))
    scene.merge(*range(12))
    scene.train(0, checkpoint=-1)
    retired = len(scene.retired)
    scene.train(0, lineage=2)
    assert len(scene.retired) == retired
    scene.train(1, lineage=1)  # the old trainer is fenced
    assert len(scene.retired) == retired
    scene.train(1, lineage=2)
    assert len(scene.retired) == 12


def test_a_trained_step_that_nobody_scheduled_is_a_bad_record():
    scene = scene_of()
    scene.request(*range(12))
    scene.merge(*range(12))
    before = scene.core.snapshot()
    with pytest.raises(InvalidRecordError, match="the next one is step 0"):
        scene.train(1)
    with pytest.raises(InvalidRecordError, match="trained other groups than scheduled"):
        scene.train(0, groups=["g-0"])
    assert scene.core.snapshot() == before


def test_a_trainable_group_without_a_tree_is_a_bad_record():
    scene = scene_of()
    scene.request(2)
    merged = MergedGroup(group_id="g-2", domain="d", purpose="train", partition=0)
    with pytest.raises(InvalidRecordError, match="g-2 can train but has no tree"):
        scene.feed(merged)


def test_after_the_last_step_open_groups_are_cancelled_and_new_ones_ignored():
    scene = scene_of(queue_of(slots=4, per_step=2, window=4), steps=1)
    scene.request(*range(6))
    scene.merge(0, 1, 3)
    scene.train(0)
    assert scene.ends() == {0: "trained", 1: "trained", 2: "cancelled", 3: "cancelled"}
    scene.load(version=1)
    scene.request(7)
    scene.merge(2)
    assert len(scene.admitted) == 4
    assert len(scene.retired) == 4


# Evaluation.


def test_evaluation_groups_take_no_slot_and_retire_evaluated():
    scene = scene_of(queue_of(slots=1, per_step=1, window=1))
    scene.request(0, 1)
    scene.request(10, 11, purpose="eval")
    assert scene.admitted_ids() == [0, 10, 11]
    assert [group.queue_index for group in scene.admitted] == [0, None, None]
    scene.merge(10, not_trainable="evaluated", purpose="eval")
    scene.merge(11, not_trainable="failed", purpose="eval")
    assert scene.ends() == {10: "evaluated", 11: "failed"}
    assert scene.retired[0].purpose == "eval"


def test_evaluation_after_the_end_waits_for_the_final_weights_on_every_lane():
    scene = scene_of(queue_of(slots=1, per_step=1, window=1), lanes_reported=2, steps=1)
    scene.request(0)
    scene.merge(0)
    scene.train(0)
    scene.request(10, purpose="eval")
    scene.load(0, version=1)
    assert scene.admitted_ids() == [0]
    scene.load(1, version=1)
    assert scene.admitted_ids() == [0, 10]
    assert scene.admitted[-1].version_at_admission == 1


def test_an_evaluation_group_past_its_deadline_ends_with_what_it_has():
    scene = scene_of(ONE)
    scene.request(10, 11, purpose="eval")
    scene.open(10, 11)
    scene.tick(29)
    assert scene.closed == []
    scene.tick(30)
    assert (scene.closed, scene.ends()) == (["g-10", "g-11"], {})
    scene.merge(10, not_trainable="evaluated", purpose="eval")
    scene.tick(60)
    assert scene.ends() == {10: "evaluated", 11: "expired"}


# State.


def test_a_restored_core_has_the_same_bytes_and_goes_on_the_same_way():
    scene = scene_of(lanes_reported=2)
    scene.request(*range(20))
    scene.request(30, 31, purpose="eval")
    scene.merge(5, 3, 2, 1, 0, 7, 4, 8)
    scene.train(0, checkpoint=-1)
    scene.merge(9, not_trainable="failed")
    restored = SchedulerCore(configuration_of(DEMO))
    restored.restore(scene.core.snapshot())
    assert restored.snapshot() == scene.core.snapshot()
    twin = Scene(configuration_of(DEMO))
    twin.core, twin.steps = restored, list(scene.steps)
    for one in (scene, twin):
        one.load(0, version=1)
        one.load(1, version=1)
        one.merge(6, 10, 11)
    assert twin.admitted == scene.admitted[len(scene.admitted) - len(twin.admitted) :]
    assert restored.snapshot() == scene.core.snapshot()
