"""A group of a curriculum retires with what it showed of its task, numbered without gaps."""

from forgemq_contracts.curriculum import TaskResult
from forgemq_contracts.groups import MergedGroup, RequestedGroup
from forgemq_scheduler.core import SchedulerCore
from tests.unit.scheduler.scene import Scene, configuration_of, queue_of

QUEUE = queue_of(slots=6, per_step=2, window=4)


def request(scene: Scene, number: int, *, task_number: int | None) -> None:
    scene.feed(
        RequestedGroup(
            group_id=f"g-{number}",
            domain="d",
            purpose="train",
            group_size=4,
            task=b"{}",
            idempotency_key=f"d/{number}",
            requested_ms=0,
            task_number=task_number,
        )
    )


def merge(scene: Scene, number: int, *, solved: int, not_trainable: str = "") -> None:
    scene.feed(
        MergedGroup(
            group_id=f"g-{number}",
            domain="d",
            purpose="train",
            partition=0,
            tree_sha256=None if not_trainable else "0" * 64,
            not_trainable=not_trainable,
            scored=4,
            solved=solved,
        )
    )


def test_results_are_numbered_in_the_order_in_which_groups_retire():
    scene = Scene(configuration_of(QUEUE))
    scene.report(version=0)
    for number, task_number in enumerate((7, 5, None, 7)):
        request(scene, number, task_number=task_number)
    merge(scene, 1, solved=4, not_trainable="zero_variance")
    merge(scene, 0, solved=1)
    restored = SchedulerCore(configuration_of(QUEUE))
    restored.restore(scene.core.snapshot())
    assert restored.snapshot() == scene.core.snapshot()
    scene.core = restored
    merge(scene, 3, solved=2)
    scene.train(0)
    merge(scene, 2, solved=0, not_trainable="zero_variance")
    results = {int(group.group_id[2:]): group.result for group in scene.retired}
    assert results == {
        1: TaskResult(index=0, number=1, task_number=5, version=0, scored=4, solved=4),
        0: TaskResult(index=1, number=0, task_number=7, version=0, scored=4, solved=1),
        3: TaskResult(index=2, number=3, task_number=7, version=0, scored=4, solved=2),
        2: None,
    }


def test_a_group_that_expires_has_a_result_without_episodes():
    scene = Scene(configuration_of(queue_of(slots=6, per_step=2, window=4, claim_deadline_s=10.0)))
    scene.report(version=0)
    request(scene, 0, task_number=3)
    scene.tick(11)
    (retired,) = scene.retired
    assert retired.reason == "expired"
    assert retired.result == TaskResult(index=0, number=0, task_number=3, version=0)
