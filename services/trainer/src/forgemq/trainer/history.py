"""What earlier lives of the trainer left on the log."""

from dataclasses import dataclass

from forgemq.bus.log import Log, Place
from forgemq.contracts import topics
from forgemq.contracts.steps import TrainedStep
from forgemq.contracts.topics import PUBLISHED_WEIGHTS, TRAINED_STEPS
from forgemq.contracts.weights import PublishedWeights
from forgemq.trainer.checkpoint import Checkpoint

READ_TIMEOUT_S = 10.0
RECORDS_MAX = 256


class FencedTrainerError(Exception):
    """A newer trainer of this run has published; this one must not write any more."""


class LostCheckpointError(Exception):
    """The log has steps that no checkpoint in the folder leads to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the log says about training so far.

    Attributes:
        lineage: newest on the log, 0 for none.
        trained_steps: steps with a TrainedStep.
        checkpoint_step: the last that a checkpoint was said to hold, -1 for none.
    """

    lineage: int
    trained_steps: frozenset[int]
    checkpoint_step: int

    def next_lineage(self, checkpoint: Checkpoint | None) -> int:
        """The lineage of a trainer that starts now.

        Raises:
            LostCheckpointError: the log names a durable checkpoint newer than the one found.
        """
        found = -1 if checkpoint is None else checkpoint.step
        if found < self.checkpoint_step:
            raise LostCheckpointError(
                f"the log says step {self.checkpoint_step} is in a checkpoint, the newest intact "
                f"one in FORGEMQ_TRAINER_FOLDER is of step {found}"
            )
        saved = 0 if checkpoint is None else checkpoint.record.trained.lineage
        return max(self.lineage, saved) + 1


async def read_history(log: Log) -> History:
    """Read trained-steps and published-weights from their beginning to their end."""
    lineage, checkpoint_step = 0, -1
    steps: set[int] = set()
    for record in await _all_of(log):
        fact = topics.decode(topics.BY_NAME[record[0]], record[1])
        if isinstance(fact, TrainedStep):
            steps.add(fact.step)
            lineage = max(lineage, fact.lineage)
            checkpoint_step = max(checkpoint_step, fact.checkpoint_step)
        elif isinstance(fact, PublishedWeights):
            lineage = max(lineage, fact.lineage)
    return History(lineage=lineage, trained_steps=frozenset(steps), checkpoint_step=checkpoint_step)


async def _all_of(log: Log) -> list[tuple[str, bytes]]:
    places = [Place(topic.name, 0) for topic in (TRAINED_STEPS, PUBLISHED_WEIGHTS)]
    ends = await log.end_positions(places)
    reader = await log.reader(await log.first_positions(places))
    values: list[tuple[str, bytes]] = []
    try:
        while any(reader.position(place) < ends[place] for place in places):
            records = await reader.read(timeout_s=READ_TIMEOUT_S, records_max=RECORDS_MAX)
            values += [(record.topic, record.value) for record in records]
    finally:
        await reader.close()
    return values
