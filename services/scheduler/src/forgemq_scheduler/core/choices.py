"""What the groups of a curriculum show of their tasks."""

from forgemq_contracts.asked_keys import number_of
from forgemq_contracts.curriculum import TaskResult
from forgemq_contracts.groups import MergedGroup, RequestedGroup
from forgemq_scheduler.core.snapshot import Choice


def choice_of(request: RequestedGroup, *, version: int) -> Choice | None:
    """The choice that a request is; None if it has no task number, or no number of its own.

    Args:
        request: Of a training group.
        version: That serves as it is admitted.
    """
    number = number_of(request.idempotency_key, source=request.domain)
    if request.task_number is None or number is None:
        return None
    return Choice(number=number, task_number=request.task_number, version=version)


def scored_choice(choice: Choice, merged: MergedGroup) -> Choice:
    """The choice with how the episodes of its group ended."""
    return Choice(
        number=choice.number,
        task_number=choice.task_number,
        version=choice.version,
        scored=merged.scored,
        solved=merged.solved,
    )


def result_of(choice: Choice, *, index: int) -> TaskResult:
    """The result of a group that is over, as number `index` of its domain."""
    return TaskResult(
        index=index,
        number=choice.number,
        task_number=choice.task_number,
        version=choice.version,
        scored=choice.scored,
        solved=choice.solved,
    )
