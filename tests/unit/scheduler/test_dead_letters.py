"""The group of a bad record fails once, with its reason, in every state it may be in."""

import pytest

from forgemq_contracts.dead_letters import DeadLetter
from tests.unit.scheduler.scene import Scene, configuration_of, queue_of

DETAIL = "finished-completions-v1 at offset 7 is no record: does not decode: torn"


def scene_of(*, slots: int, per_step: int, window: int) -> Scene:
    queue = queue_of(slots=slots, per_step=per_step, window=window)
    scene = Scene(configuration_of(queue, ahead=0))
    scene.report()
    return scene


def write_dead_letter(scene: Scene, number: int, *, topic: str = "finished-completions-v1") -> None:
    scene.feed(
        DeadLetter(
            topic=topic,
            partition=0,
            offset=7,
            reason="does not decode: torn",
            group=f"g-{number}",
        )
    )


@pytest.fixture
def scene() -> Scene:
    """Three slots, two groups a step; groups 0 to 2 are open and 3 waits."""
    scene = scene_of(slots=3, per_step=2, window=2)
    scene.request(0, 1, 2, 3)
    assert scene.admitted_ids() == [0, 1, 2]
    return scene


def test_an_open_group_fails_once_and_its_slot_is_free_at_once(scene: Scene):
    write_dead_letter(scene, 1)
    write_dead_letter(scene, 1)
    assert [(end.group_id, end.reason, end.detail) for end in scene.retired] == [
        ("g-1", "failed", DETAIL)
    ]
    assert scene.retired[0].queue_index == 1
    assert scene.admitted_ids() == [0, 1, 2, 3]


def test_a_finished_group_that_no_step_has_taken_fails_and_leaves_the_window():
    scene = scene_of(slots=4, per_step=1, window=1)
    scene.request(0, 1)
    scene.merge(1)  # Behind the head, outside the window.
    write_dead_letter(scene, 1)
    assert scene.ends() == {1: "failed"}
    scene.merge(0)
    assert scene.taken(0) == [0]


def test_a_group_that_a_step_has_taken_is_trained_all_the_same(scene: Scene):
    scene.merge(0, 1)
    write_dead_letter(scene, 1)
    assert scene.retired == []
    scene.train(0)
    assert scene.ends() == {0: "trained", 1: "trained"}


def test_where_the_trainer_cannot_load_it_the_bad_record_is_named(scene: Scene):
    scene.merge(0, 1)
    write_dead_letter(scene, 1, topic="merged-trees-v1")
    restored = scene_of(slots=3, per_step=2, window=2)
    restored.core.restore(scene.core.snapshot())
    restored.steps = scene.steps
    restored.train(0, failed=(1,))
    [failed] = [end for end in restored.retired if end.reason == "failed"]
    assert failed.detail == DETAIL.replace("finished-completions", "merged-trees")


def test_an_evaluation_group_fails_too(scene: Scene):
    scene.request(9, purpose="eval")
    write_dead_letter(scene, 9)
    assert scene.ends() == {9: "failed"}


def test_a_group_that_waits_never_gets_a_slot(scene: Scene):
    write_dead_letter(scene, 3)
    scene.request(3)
    write_dead_letter(scene, 0)
    assert scene.ends() == {3: "failed", 0: "failed"}
    assert scene.retired[0].queue_index is None
    assert scene.admitted_ids() == [0, 1, 2]


def test_a_request_that_does_not_decode_ends_the_group_of_its_key(scene: Scene):
    """The agent waits for the group, and no other record about it will come."""
    write_dead_letter(scene, 7, topic="requested-groups-v1")
    scene.request(7)
    assert [(end.group_id, end.reason, end.purpose) for end in scene.retired] == [
        ("g-7", "failed", "train")
    ]


@pytest.mark.parametrize("group", ["", "g-7"])
def test_a_letter_about_no_known_group_changes_nothing(scene: Scene, group: str):
    before = scene.core.snapshot()
    letter = DeadLetter(topic="graded-episodes-v1", partition=0, offset=1, reason="", group=group)
    assert scene.feed(letter) == []
    assert scene.core.snapshot() == before


def test_a_letter_about_a_retired_group_changes_nothing(scene: Scene):
    write_dead_letter(scene, 0)
    before = scene.core.snapshot()
    write_dead_letter(scene, 0, topic="requested-groups-v1")
    assert scene.core.snapshot() == before
