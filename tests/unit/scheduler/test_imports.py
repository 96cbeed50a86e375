"""Conversations that were finished elsewhere are evaluations of their own kind."""

from tests.unit.scheduler.scene import queue_of, scene_of


def test_imports_take_no_slot_are_admitted_as_such_and_are_in_no_step():
    scene = scene_of(queue_of(slots=1, per_step=1, window=1))
    scene.request(10, 11, purpose="eval", source="import")
    scene.request(0)
    assert [(group.source, group.queue_index) for group in scene.admitted] == [
        ("import", None),
        ("import", None),
        ("agent", 0),
    ]
    scene.merge(10, not_trainable="evaluated", purpose="eval")
    scene.merge(11, not_trainable="evaluated", purpose="eval")
    assert scene.ends() == {10: "evaluated", 11: "evaluated"}
    assert scene.steps == []
