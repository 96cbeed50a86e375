"""Which steps are scheduled, and which of them the trainer has trained."""

from forgemq_contracts.messages import InvalidRecordError
from forgemq_contracts.run import Trainer
from forgemq_contracts.steps import TrainedStep
from forgemq_scheduler.core.snapshot import TakenStep


class Steps:
    """Steps 0 to `trainer.steps` - 1, each scheduled once and trained once.

    A restarted trainer trains steps again after an older checkpoint; that changes the lineage
    and nothing else, because their groups have retired already.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.count = trainer.steps
        self._ahead_max = trainer.steps_ahead_max
        self.scheduled = 0
        self.trained = 0
        self.lineage = 0
        self._in_training: dict[int, TakenStep] = {}  # scheduled, not trained

    @property
    def has_ended(self) -> bool:
        """Whether the last step is trained."""
        return self.trained >= self.count

    def forming(self) -> int | None:
        """The step that may be scheduled next; None if it must wait, or if all are scheduled."""
        step = self.scheduled
        may_be = step < self.count and step <= self.trained + self._ahead_max
        return step if may_be else None

    def schedule(self, taken: TakenStep) -> None:
        """Note that the step that forms is written."""
        self._in_training[taken.step] = taken
        self.scheduled += 1

    def finish(self, record: TrainedStep) -> TakenStep | None:
        """Apply that a step is trained; None if it was trained before.

        Raises:
            InvalidRecordError: It is not the next step, or trained other groups.
        """
        if record.lineage < self.lineage:
            return None  # a trainer that has not noticed yet that another one replaced it
        if record.step < self.trained:
            self.lineage = record.lineage
            return None
        if record.step > self.trained or record.step not in self._in_training:
            raise InvalidRecordError(
                f"step {record.step} is trained, but the next one is step {self.trained} "
                f"and {self.scheduled} steps are scheduled"
            )
        taken = self._in_training[record.step]
        if sorted((*record.group_ids, *record.failed_group_ids)) != sorted(taken.group_ids):
            raise InvalidRecordError(f"step {record.step} trained other groups than scheduled")
        self.lineage = record.lineage
        self.trained += 1
        return self._in_training.pop(record.step)

    def in_training(self) -> tuple[TakenStep, ...]:
        """Scheduled steps that are not trained, by number."""
        return tuple(self._in_training[step] for step in sorted(self._in_training))

    def restore(
        self, *, scheduled: int, trained: int, lineage: int, in_training: tuple[TakenStep, ...]
    ) -> None:
        """Replace all state."""
        self.scheduled, self.trained, self.lineage = scheduled, trained, lineage
        self._in_training = {taken.step: taken for taken in in_training}

    def _check(self) -> None:
        assert self.scheduled == self.trained + len(self._in_training)
        assert len(self._in_training) <= self._ahead_max + 1, "too many steps ahead"
