"""The trainer's folder: `weights/` that engines read, `checkpoints/` that a restart reads."""

from pathlib import Path

from forgemq.contracts.run import RunConfiguration
from forgemq.contracts.steps import TrainedStep
from forgemq.telemetry.telemetry import Telemetry
from forgemq.trainer.checkpoint import (
    Checkpoint,
    checkpoints,
    configuration_sha256,
    remove_older,
    write_checkpoint,
)
from forgemq.trainer.training import Training
from forgemq.trainer.weights import (
    WEIGHTS_FILE,
    WeightsFolder,
    described,
    link_weights,
    write_weights,
)

WEIGHTS_KEPT_MIN = 4
"""Versions whose durable copy stays: a lane may still be reading one that was just replaced."""


class Store:
    """Reads and writes the folder of one run; blocking, so called from a worker thread."""

    def __init__(
        self, folder: str, *, configuration: RunConfiguration, telemetry: Telemetry
    ) -> None:
        self._checkpoints = Path(folder) / "checkpoints"
        self._weights = Path(folder) / "weights"
        self._configuration = configuration
        self._base = Path(configuration.model.path)
        self._telemetry = telemetry

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint whose checksums hold; None where there is none.

        Raises:
            OtherRunError: the folder is another run's.
        """
        for found in checkpoints(self._checkpoints, run=self._configuration.run):
            if isinstance(found, Path):
                self._telemetry.event("checkpoint_damaged", folder=str(found))
                continue
            if found.record.configuration_sha256 != configuration_sha256(self._configuration):
                self._telemetry.event("configuration_changed", since_step=found.step)
            return found
        return None

    def restored_weights(
        self, training: Training, checkpoint: Checkpoint | None, *, lineage: int
    ) -> WeightsFolder:
        """Durable weights of the version that training starts from."""
        place = self._place(lineage=lineage, version=training.version)
        if checkpoint is not None:
            return link_weights(described(checkpoint.folder), place=place)
        if (self._base / WEIGHTS_FILE).exists():
            return described(self._base)
        return self._written(training, place)

    def save_weights(self, training: Training, *, lineage: int) -> WeightsFolder:
        """Write the present version durably."""
        weights = self._written(training, self._place(lineage=lineage, version=training.version))
        kept = max(WEIGHTS_KEPT_MIN, self._configuration.trainer.checkpoints_kept)
        remove_older(self._weights, kept=kept, pattern="lineage-*-version-*")
        return weights

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
        kept = self._configuration.trainer.checkpoints_kept
        remove_older(self._checkpoints, kept=kept, pattern="step-*")

    def _written(self, training: Training, place: Path) -> WeightsFolder:
        return write_weights(
            training.model, base=self._base, dtype=self._configuration.model.dtype, place=place
        )

    def _place(self, *, lineage: int, version: int) -> Path:
        return self._weights / f"lineage-{lineage:06d}-version-{version:08d}"
