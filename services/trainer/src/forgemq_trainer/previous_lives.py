"""What earlier lives of the trainer left on the log."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from forgemq_bus.log import Log, Place
from forgemq_bus.reading import read_to_end
from forgemq_contracts import topics
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.topics import PUBLISHED_WEIGHTS, TRAINED_STEPS
from forgemq_contracts.weights import PublishedWeights
from forgemq_trainer.storage.checkpoint import Checkpoint


class FencedTrainerError(Exception):
    """A newer trainer of this run has published; this one must not write any more."""


class LostCheckpointError(Exception):
    """The log names a checkpoint that is gone or damaged; says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHistory:
    """What the log says about training so far.

    Attributes:
        lineage: newest on the log, 0 for none.
        trained: the first TrainedStep of each step: the one that the groups were accounted by.
        checkpoint_step: the last that a checkpoint was said to hold, -1 for none.
    """

    lineage: int
    trained: Mapping[int, TrainedStep]
    checkpoint_step: int

    def next_lineage(self, checkpoint: Checkpoint | None) -> int:
        """The lineage of a trainer that starts now.

        Raises:
            LostCheckpointError: the log names a durable checkpoint newer than the one found. An
                older one is no way on: the trees of its next steps may be trimmed.
        """
        found = -1 if checkpoint is None else checkpoint.step
        if found < self.checkpoint_step:
            newest = "none is intact" if found < 0 else f"the newest intact one is of step {found}"
            raise LostCheckpointError(
                f"the log says step {self.checkpoint_step} is in a checkpoint, but in "
                f"FORGEMQ_TRAINER_FOLDER {newest}: put back a copy of checkpoints/"
                f"step-{self.checkpoint_step:08d}, or start a new run whose model.path is an "
                "intact checkpoint"
            )
        saved = 0 if checkpoint is None else checkpoint.record.trained.lineage
        return max(self.lineage, saved) + 1


async def read_history(log: Log) -> StepHistory:
    """Read trained-steps and published-weights from their beginning to their end.

    A record that does not decode says nothing and is left out.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    lineage, checkpoint_step = 0, -1
    trained: dict[int, TrainedStep] = {}
    for fact in await _facts(log):
        lineage = max(lineage, fact.lineage)
        if isinstance(fact, TrainedStep):
            trained.setdefault(fact.step, fact)
            checkpoint_step = max(checkpoint_step, fact.checkpoint_step)
    return StepHistory(lineage=lineage, trained=trained, checkpoint_step=checkpoint_step)


async def _facts(log: Log) -> list[TrainedStep | PublishedWeights]:
    places = [Place(topic.name, 0) for topic in (TRAINED_STEPS, PUBLISHED_WEIGHTS)]
    facts: list[TrainedStep | PublishedWeights] = []
    async for records in read_to_end(log, await log.first_positions(places)):
        for record in records:
            with contextlib.suppress(msgspec.ValidationError):
                fact = topics.decode(topics.BY_NAME[record.topic], record.value)
                assert isinstance(fact, TrainedStep | PublishedWeights)
                facts.append(fact)
    return facts
