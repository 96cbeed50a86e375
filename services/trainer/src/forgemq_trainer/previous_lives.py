"""What previous lives of the trainer left on the log, and what that makes of this life.

A life is one process of the trainer, from its start to its end. Each life of a run has a lineage, a
number above those of all lives before it.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from forgemq_bus.bounded_reads import read_to_end
from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Log, Place, TransactionWriter, Writer
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.topics import PUBLISHED_WEIGHTS, TRAINED_STEPS
from forgemq_contracts.weights import PublishedWeights
from forgemq_trainer.storage.checkpoint import Checkpoint


class FencedTrainerError(Exception):
    """A newer trainer of this run has published; this one must not write any more."""


class LostCheckpointError(Exception):
    """The log names a checkpoint that is lost or damaged; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLife:
    """This life of the trainer, as the log sees it.

    Attributes:
        lineage: Above that of every previous life.
        claim: Writes trained-steps; the broker refuses it once a newer life has opened its own.
        writer: Writes published-weights.
    """

    lineage: int
    claim: TransactionWriter
    writer: Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousLives:
    """What the log says about training so far.

    Attributes:
        lineage: The newest on the log; 0 if the log is empty.
        trained: The first TrainedStep of each step: the one that its groups were accounted by.
        published: Versions that some life published, and engines may have sampled with.
        checkpoint_step: The newest step that a durable checkpoint holds, by the log; -1 if none.
    """

    lineage: int = 0
    trained: Mapping[int, TrainedStep] = field(default_factory=dict)
    published: frozenset[int] = frozenset()
    checkpoint_step: int = -1

    def next_lineage(self, checkpoint: Checkpoint | None) -> int:
        """The lineage of a trainer that continues after this checkpoint.

        Raises:
            LostCheckpointError: the log names a newer checkpoint than the one found. An older one
                cannot replace it: the trees of the steps after it may already be deleted.
        """
        found = -1 if checkpoint is None else checkpoint.step
        if found < self.checkpoint_step:
            newest = (
                "no checkpoint is intact"
                if found < 0
                else f"the newest intact one is of step {found}"
            )
            raise LostCheckpointError(
                f"the log says step {self.checkpoint_step} is in a checkpoint, but in "
                f"FORGEMQ_TRAINER_FOLDER {newest}: put back a copy of checkpoints/"
                f"step-{self.checkpoint_step:08d}, or start a new run whose model.path is an "
                "intact checkpoint"
            )
        # A life may have crashed between its checkpoint and its TrainedStep: then the checkpoint
        # knows its lineage and the log does not.
        saved = 0 if checkpoint is None else checkpoint.record.trained.lineage
        return max(self.lineage, saved) + 1


async def read_previous_lives(log: Log) -> PreviousLives:
    """Read trained-steps and published-weights from their beginning to their end.

    Skips records that do not decode.

    Raises:
        LogUnavailableError: the log could not be read to its end.
    """
    lineage, checkpoint_step = 0, -1
    trained: dict[int, TrainedStep] = {}
    published: set[int] = set()
    for fact in await _read_facts(log):
        lineage = max(lineage, fact.lineage)
        if isinstance(fact, TrainedStep):
            trained.setdefault(fact.step, fact)
            checkpoint_step = max(checkpoint_step, fact.checkpoint_step)
        else:
            published.add(fact.version)
    return PreviousLives(
        lineage=lineage,
        trained=trained,
        published=frozenset(published),
        checkpoint_step=checkpoint_step,
    )


async def _read_facts(log: Log) -> list[TrainedStep | PublishedWeights]:
    places = [Place(topic.name, 0) for topic in (TRAINED_STEPS, PUBLISHED_WEIGHTS)]
    facts: list[TrainedStep | PublishedWeights] = []
    async for records in read_to_end(log, await log.first_positions(places)):
        for record in records:
            with contextlib.suppress(msgspec.ValidationError):
                fact = decoded_record(record)
                assert isinstance(fact, TrainedStep | PublishedWeights)
                facts.append(fact)
    return facts
