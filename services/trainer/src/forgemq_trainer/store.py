"""What the trainer stores: weights that engines read, checkpoints that a restart reads."""

from pathlib import Path

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import TrainedStep
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.storage.checkpoint import (
    Checkpoint,
    HeadState,
    TrainingState,
    check_configuration,
    checkpoints,
    remove_older,
    write_checkpoint,
)
from forgemq_trainer.storage.durable import DurableWeights
from forgemq_trainer.storage.weights import (
    WEIGHTS_FILE,
    WeightsFolder,
    link_weights,
    read_weights_folder,
    write_weights,
)
from forgemq_trainer.training import Training

WEIGHTS_KEPT_MIN = 4
"""Versions whose durable copy stays: a lane may still read one that was just replaced, and a slow
lane may be some versions behind."""


class Store:
    """Checkpoints in the trainer's folder, weights beside the run's blobs.

    Its methods block, so call them from a worker thread.
    """

    def __init__(
        self, folder: str, *, blobs: str, configuration: RunConfiguration, telemetry: Telemetry
    ) -> None:
        self._checkpoints = Path(folder) / "checkpoints"
        self._weights = DurableWeights(
            blobs, run=configuration.run, drafts=Path(folder) / "weights"
        )
        self._checkpointed: frozenset[Path] = frozenset()
        self._configuration = configuration
        self._base = Path(configuration.model.path)
        speculation = configuration.speculation
        self._base_head = Path("" if speculation is None else speculation.head)
        self._telemetry = telemetry

    def newest_checkpoint(self) -> Checkpoint | None:
        """Find the newest checkpoint whose checksums hold; None without one.

        Raises:
            OtherRunError: the folder belongs to another run.
            OtherConfigurationError: the run's configuration differs from the checkpoint's.
        """
        # If the log names a newer one than this, `PreviousLives.next_lineage` stops the trainer.
        for found in checkpoints(self._checkpoints, run=self._configuration.run):
            if isinstance(found, Path):
                self._telemetry.event("checkpoint_damaged", folder=str(found))
                continue
            check_configuration(found.record.configuration, self._configuration)
            return found
        return None

    def save_restored_weights(
        self, training: Training, checkpoint: Checkpoint | None, *, lineage: int
    ) -> WeightsFolder:
        """Save the version that training starts from durably, under this lineage."""
        folder = self._weights.local_folder(lineage=lineage, version=training.version)
        if checkpoint is not None:
            weights = link_weights(read_weights_folder(checkpoint.folder), folder=folder)
            self._checkpointed = frozenset({folder})
            return self._weights.upload(weights)
        if (self._base / WEIGHTS_FILE).exists():
            return read_weights_folder(self._base)  # Engines start with this very folder.
        return self._weights.upload(self._write(training, folder))

    def save_weights(self, training: Training, *, lineage: int) -> WeightsFolder:
        """Save the current version durably, and remove versions that no lane loads any more."""
        folder = self._weights.local_folder(lineage=lineage, version=training.version)
        uploaded = self._weights.upload(self._write(training, folder))
        kept = max(WEIGHTS_KEPT_MIN, self._configuration.trainer.checkpoints_kept)
        self._weights.remove_older(kept=kept, besides=self._checkpointed)
        return uploaded

    def save_checkpoint(
        self,
        training: Training,
        *,
        weights: WeightsFolder,
        trained: TrainedStep,
        tree_positions: tuple[tuple[int, int], ...],
    ) -> None:
        """Write a checkpoint durably, and remove the oldest ones beyond `checkpoints_kept`."""
        state = TrainingState(
            trained=trained, configuration=self._configuration, tree_positions=tree_positions
        )
        write_checkpoint(
            self._checkpoints,
            state,
            weights=weights,
            optimizer=training.optimizer_state(),
            head=self._head_state(training),
        )
        # Its weights must outlive WEIGHTS_KEPT_MIN: after a restart lanes load them again.
        self._checkpointed = frozenset(
            {self._weights.local_folder(lineage=trained.lineage, version=training.version)}
        )
        kept = self._configuration.trainer.checkpoints_kept
        remove_older(self._checkpoints, kept=kept, pattern="step-*")

    def _head_state(self, training: Training) -> HeadState | None:
        if training.head is None:
            return None
        return HeadState(
            tensors=training.head.weights(),
            optimizer=training.head.optimizer_state(),
            base=self._base_head,
        )

    def _write(self, training: Training, folder: Path) -> WeightsFolder:
        return write_weights(
            training.model,
            base=self._base,
            dtype=self._configuration.model.dtype,
            folder=folder,
            state=training.whole_weights(),
        )
