"""What the trainer keeps: weights that engines read, checkpoints that a restart reads."""

from pathlib import Path

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import TrainedStep
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.storage.checkpoint import (
    Checkpoint,
    check_configuration,
    checkpoints,
    remove_older,
    write_checkpoint,
)
from forgemq_trainer.storage.durable import DurableWeights
from forgemq_trainer.storage.weights import (
    WEIGHTS_FILE,
    WeightsFolder,
    described,
    link_weights,
    write_weights,
)
from forgemq_trainer.training import Training

WEIGHTS_KEPT_MIN = 4
"""Versions whose durable copy stays: a lane may still be reading one that was just replaced."""


class Store:
    """Checkpoints in the trainer's folder, weights beside the run's blobs.

    Blocking, so called from a worker thread.
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
        self._telemetry = telemetry

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint whose checksums hold; None where there is none.

        Raises:
            OtherRunError: the folder is another run's.
            OtherConfigurationError: the run has another configuration now.
        """
        for found in checkpoints(self._checkpoints, run=self._configuration.run):
            if isinstance(found, Path):
                self._telemetry.event("checkpoint_damaged", folder=str(found))
                continue
            check_configuration(found.record.configuration, self._configuration)
            return found
        return None

    def restored_weights(
        self, training: Training, checkpoint: Checkpoint | None, *, lineage: int
    ) -> WeightsFolder:
        """Durable weights of the version that training starts from."""
        place = self._place(lineage=lineage, version=training.version)
        if checkpoint is not None:
            weights = link_weights(described(checkpoint.folder), place=place)
            self._checkpointed = frozenset({place})
            return self._weights.published(weights)
        if (self._base / WEIGHTS_FILE).exists():
            return described(self._base)  # Engines start with this very folder.
        return self._weights.published(self._written(training, place))

    def save_weights(self, training: Training, *, lineage: int) -> WeightsFolder:
        """Write the present version durably; versions that no lane can still load go."""
        weights = self._written(training, self._place(lineage=lineage, version=training.version))
        published = self._weights.published(weights)
        kept = max(WEIGHTS_KEPT_MIN, self._configuration.trainer.checkpoints_kept)
        self._weights.remove_older(kept=kept, besides=self._checkpointed)
        return published

    def save_checkpoint(
        self,
        training: Training,
        *,
        weights: WeightsFolder,
        trained: TrainedStep,
        tree_positions: tuple[tuple[int, int], ...],
    ) -> None:
        """Write a checkpoint durably, and remove those that are too old."""
        write_checkpoint(
            self._checkpoints,
            weights=weights,
            optimizer=training.optimizer_state(),
            trained=trained,
            configuration=self._configuration,
            tree_positions=tree_positions,
        )
        self._checkpointed = frozenset(
            {self._place(lineage=trained.lineage, version=training.version)}
        )
        kept = self._configuration.trainer.checkpoints_kept
        remove_older(self._checkpoints, kept=kept, pattern="step-*")

    def _written(self, training: Training, place: Path) -> WeightsFolder:
        return write_weights(
            training.model,
            base=self._base,
            dtype=self._configuration.model.dtype,
            place=place,
            state=training.whole_weights(),
        )

    def _place(self, *, lineage: int, version: int) -> Path:
        return self._weights.place(lineage=lineage, version=version)
