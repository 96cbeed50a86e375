"""What the trainer stores: weights that engines read, checkpoints that a restart reads."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from forgemq_contracts.lora import publishes_adapters
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import trained_head
from forgemq_contracts.steps import TrainedStep
from forgemq_fp8_blocks import NothingToQuantiseError
from forgemq_settings.environment import SettingsError
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.storage.adapters import model_sha256, write_adapter
from forgemq_trainer.storage.checkpoint import (
    Checkpoint,
    HeadState,
    TrainingState,
    check_configuration,
    checkpoints,
    remove_older,
    set_aside_newer,
    write_checkpoint,
)
from forgemq_trainer.storage.durable import DurableWeights
from forgemq_trainer.storage.folders import remove_folder, remove_leftovers
from forgemq_trainer.storage.heads import write_head
from forgemq_trainer.storage.weights import (
    WEIGHTS_FILE,
    SavedVersion,
    WeightsFolder,
    WholeVersion,
    link_weights,
    read_weights_folder,
    write_quantised,
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
        self,
        settings: TrainerSettings,
        *,
        blobs: str,
        configuration: RunConfiguration,
        telemetry: Telemetry,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Read and write nothing yet.

        Args:
            settings: Folder of the checkpoints, length of a chain of deltas.
            blobs: The run's blobs, as an fsspec address.
            configuration: Of the run.
            telemetry: For events and gauges.
            is_stopping: Whether the trainer is to stop; then no store is waited for.
        """
        folder = Path(settings.folder)
        self._checkpoints = folder / "checkpoints"
        self._whole = folder / "whole"
        self._weights = DurableWeights(
            blobs,
            run=configuration.run,
            drafts=folder / "weights",
            telemetry=telemetry,
            is_stopping=is_stopping,
            deltas_max=settings.deltas_max,
        )
        self._heads = DurableWeights(
            blobs,
            run=f"{configuration.run}/heads",
            drafts=folder / "heads",
            telemetry=telemetry,
            is_stopping=is_stopping,
        )
        self._checkpointed: frozenset[Path] = frozenset()
        self._configuration = configuration
        self._base = Path(configuration.model.path)
        self._lora = configuration.lora
        self._reference_sha256 = ""
        trained = trained_head(configuration.speculation)
        self._base_head = Path("" if trained is None else trained.head)
        self._telemetry = telemetry

    def newest_checkpoint(self) -> Checkpoint | None:
        """Find the newest checkpoint whose checksums hold; None without one.

        Raises:
            OtherRunError: the folder belongs to another run.
            OtherConfigurationError: the run's configuration differs from the checkpoint's.
            SettingsError: the checkpoint's adapter, or its loss's reference, belongs to another
                base model.
        """
        # If the log names a newer one than this, `PreviousLives.next_lineage` stops the trainer.
        for found in checkpoints(self._checkpoints, run=self._configuration.run):
            if isinstance(found, Path):
                self._telemetry.event("checkpoint_damaged", folder=str(found))
                continue
            check_configuration(found.record.configuration, self._configuration)
            if self._lora is not None:
                self._check_base(found, "the adapter", sha256=found.record.weights_sha256)
            if self._has_reference and (sha256 := found.record.reference_sha256):
                self._check_base(found, "the reference of the loss", sha256=sha256)
            return found
        return None

    def begin_after(self, checkpoint: Checkpoint | None) -> None:
        """Remove what a killed life was writing, and set later, damaged checkpoints aside.

        These would count among the newest that are kept, and one that could be read later on would
        be taken for this life's, which trains its step again. A draft is as large as the model.
        """
        for folder in (self._checkpoints, self._checkpoints.parent):
            remove_leftovers(folder)
        for weights in (self._weights, self._heads):
            weights.remove_leftovers()
        set_aside_newer(self._checkpoints, than=checkpoint)

    def save_restored(
        self, training: Training, checkpoint: Checkpoint | None, *, lineage: int
    ) -> SavedVersion:
        """Save the version that training starts from durably, under this lineage.

        It names its draft head, unless it is the one that engines start with.

        Raises:
            BlobError: the object store refuses, or has been away for too long.
        """
        # Of the model as a new run loads it, also without a reference: a resume may ask for one.
        found = self._base_sha256 if checkpoint is None else checkpoint.record.reference_sha256
        self._reference_sha256 = found or (self._base_sha256 if self._has_reference else "")
        if self._lora is not None and (checkpoint is not None or self._publishes_adapters):
            self._checkpointed = frozenset({self._folder(training, lineage=lineage)})
            saved = self.keep_version(self._write_policy(training, lineage=lineage))
        else:
            weights = self._save_restored_weights(training, checkpoint, lineage=lineage)
            saved = SavedVersion(version=training.version, weights=weights)
        head = self._save_head(training, lineage=lineage) if training.version else None
        return dataclasses.replace(saved, head=head)

    def write_version(self, training: Training, *, lineage: int) -> SavedVersion:
        """Write the current version locally, and every so many versions the draft head with it.

        `keep_version` makes it durable.
        """
        written = self._write_policy(training, lineage=lineage)
        trained = trained_head(self._configuration.speculation)
        if trained is None or training.version % trained.push_every_steps:
            return written
        return dataclasses.replace(written, head=self._write_head(training, lineage=lineage))

    def _write_policy(self, training: Training, *, lineage: int) -> SavedVersion:
        folder = self._folder(training, lineage=lineage)
        version, whole = training.saving.whole_version(), None
        if self._is_quantised or self._lora is not None:
            # Its checkpoint has links to these files, so only the newest is needed here.
            remove_folder(self._whole)
        if self._is_quantised:
            whole = self._write(training, version, self._whole / folder.name)
            weights = self._quantise(whole.folder, folder)
        elif self._publishes_adapters:
            weights = self._write_adapter(version, folder)
        else:
            weights = self._write(training, version, folder)
        if self._lora is not None and not self._publishes_adapters:
            whole = self._write_adapter(version, self._whole / "adapter")
        return SavedVersion(version=training.version, weights=weights, whole=whole)

    def keep_version(self, written: SavedVersion) -> SavedVersion:
        """Make a written version durable, and remove versions that no lane loads any more.

        Raises:
            BlobError: the object store refuses, or has been away for too long.
        """
        weights = self._keep(written.weights)
        head = None if written.head is None else self._keep_head(written.head)
        return dataclasses.replace(written, weights=weights, head=head)

    def _save_restored_weights(
        self, training: Training, checkpoint: Checkpoint | None, *, lineage: int
    ) -> WeightsFolder:
        folder = self._folder(training, lineage=lineage)
        if self._is_quantised:
            source = self._base if checkpoint is None else checkpoint.folder
            self._checkpointed = frozenset({folder})
            return self._weights.keep(self._quantise(source, folder))
        if checkpoint is not None:
            weights = link_weights(read_weights_folder(checkpoint.folder), folder=folder)
            self._checkpointed = frozenset({folder})
            return self._weights.keep(weights)
        if (self._base / WEIGHTS_FILE).exists():
            # Engines start with this very folder.
            return read_weights_folder(self._base, sha256=self._base_sha256)
        return self._weights.keep(self._write(training, training.saving.whole_version(), folder))

    def _keep(self, weights: WeightsFolder) -> WeightsFolder:
        durable = self._weights.keep(weights)
        self._weights.remove_older(kept=self._kept, besides=self._checkpointed)
        for delta in durable.deltas[-1:]:
            self._telemetry.gauge("trainer.changed_share", delta.changed_share)
            self._telemetry.gauge("trainer.delta_bytes", delta.size_bytes)
        return durable

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
            trained=trained,
            configuration=self._configuration,
            tree_positions=tree_positions,
            reference_sha256=self._reference_sha256,
        )
        write_checkpoint(
            self._checkpoints,
            state,
            weights=weights,
            write_optimizer=training.saving.save_optimizer,
            head=self._head_state(training),
        )
        # Its weights must outlive WEIGHTS_KEPT_MIN: after a restart lanes load them again.
        self._checkpointed = frozenset({self._folder(training, lineage=trained.lineage)})
        kept = self._configuration.trainer.checkpoints_kept
        remove_older(self._checkpoints, kept=kept, pattern="step-*")

    def _folder(self, training: Training, *, lineage: int) -> Path:
        return self._weights.local_folder(lineage=lineage, version=training.version)

    @property
    def _publishes_adapters(self) -> bool:
        return publishes_adapters(self._lora)

    @cached_property
    def _base_sha256(self) -> str:
        return model_sha256(self._base)

    @property
    def _has_reference(self) -> bool:
        return bool(self._configuration.loss.reference_weight)

    def _check_base(self, checkpoint: Checkpoint, what: str, *, sha256: str) -> None:
        if sha256 != self._base_sha256:
            raise SettingsError(
                f"model.path: {what} in {checkpoint.folder} belongs to a base model with "
                f"sha256 {sha256}, and {self._base} has {self._base_sha256}: put that model back"
            )

    @property
    def _is_quantised(self) -> bool:
        return self._configuration.model.engine_quantization != "none"

    def _quantise(self, source: Path, folder: Path) -> WeightsFolder:
        model = self._configuration.model
        try:
            return write_quantised(source, dtype=model.dtype, folder=folder)
        except NothingToQuantiseError as error:
            raise SettingsError(
                f"model.engine_quantization {model.engine_quantization}: {error}"
            ) from error

    @property
    def _kept(self) -> int:
        return max(WEIGHTS_KEPT_MIN, self._configuration.trainer.checkpoints_kept)

    def _save_head(self, training: Training, *, lineage: int) -> WeightsFolder | None:
        """Save the draft head durably and remove older ones; None if the run trains none."""
        head = self._write_head(training, lineage=lineage)
        return None if head is None else self._keep_head(head)

    def _write_head(self, training: Training, *, lineage: int) -> WeightsFolder | None:
        if training.head is None:
            return None
        return write_head(
            training.head.weights(),
            base=self._base_head,
            dtype=self._configuration.model.dtype,
            folder=self._heads.local_folder(lineage=lineage, version=training.version),
        )

    def _keep_head(self, head: WeightsFolder) -> WeightsFolder:
        durable = self._heads.keep(head)
        # None has to outlive these: a trainer that starts again publishes its own.
        self._heads.remove_older(kept=self._kept, besides=frozenset())
        return durable

    def _head_state(self, training: Training) -> HeadState | None:
        if training.head is None:
            return None
        return HeadState(
            tensors=training.head.weights(),
            optimizer=training.head.optimizer_state(),
            base=self._base_head,
        )

    def _write(self, training: Training, version: WholeVersion, folder: Path) -> WeightsFolder:
        return write_weights(
            training.model,
            base=self._base,
            dtype=self._configuration.model.dtype,
            folder=folder,
            state=version.weights,
        )

    def _write_adapter(self, version: WholeVersion, folder: Path) -> WeightsFolder:
        assert self._lora is not None
        return write_adapter(
            version.adapter,
            lora=self._lora,
            base=self._base,
            base_sha256=self._base_sha256,
            folder=folder,
        )
