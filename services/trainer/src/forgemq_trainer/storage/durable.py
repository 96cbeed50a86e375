"""Where engines read weights: `weights/<run>/<lineage>.<version>/` beside the run's blobs.

Engines and their inference processes read the model and the blobs, never the trainer's own folder
of checkpoints. If the blobs are in a local folder (a shared volume), weights are written there and
published as a plain path, which SGLang loads directly. If they are in an object store, the folder
is written locally and uploaded. With deltas, most versions upload only what changed since the one
before; a chain of them ends with a full copy once it is long, or larger than that.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec

from forgemq_contracts.weights import WeightsDelta
from forgemq_settings.environment import SettingsError
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.storage.folders import remove_folder, remove_leftovers, sync_folder
from forgemq_trainer.storage.uploads import Uploads
from forgemq_trainer.storage.weights import WEIGHTS_FILE, WeightsFolder
from forgemq_weight_deltas import OtherLayoutError, write_delta

DELTA_FILE = "weights.delta"
_NAME = re.compile(r"(\d+)\.(\d+)")


class DurableWeights:
    """The published versions of one run.

    Example: blobs at `s3://b/r`, run `r`: version 3 of lineage 1 is written below `drafts`, and
    uploaded to `s3://b/r/weights/r/1.3/`.
    """

    def __init__(
        self,
        blobs: str,
        *,
        run: str,
        drafts: Path,
        telemetry: Telemetry,
        is_stopping: Callable[[], bool],
        deltas_max: int = 0,
    ) -> None:
        """Write nothing yet.

        Args:
            blobs: The run's blobs, as an fsspec address.
            run: Its id.
            drafts: Local folder for versions to upload; unused if the blobs are local.
            telemetry: For what `Uploads` has to say.
            is_stopping: Whether the trainer is to stop; then no store is waited for.
            deltas_max: Longest chain of deltas; 0 for none.

        Raises:
            SettingsError: the blobs are local, and engines load them in place.
        """
        filesystem, root = fsspec.core.url_to_fs(blobs)
        self._is_local = "file" in filesystem.protocol
        self._uploads = Uploads(filesystem, telemetry=telemetry, is_stopping=is_stopping)
        self._root = f"{root.rstrip('/')}/weights/{run}"
        self._uri = f"{blobs.rstrip('/')}/weights/{run}"
        self._folder = Path(self._root) if self._is_local else drafts
        if self._is_local and deltas_max:
            raise SettingsError(
                f"FORGEMQ_TRAINER_DELTAS_MAX: {deltas_max}, but the blobs are in the local folder "
                f"{root}, where engines load whole weights; deltas are for an object store"
            )
        self._deltas_max = deltas_max
        self._newest: WeightsFolder | None = None
        # By version: those in the object store that it is made of, besides itself.
        self._made_of: dict[str, frozenset[str]] = {}

    def local_folder(self, *, lineage: int, version: int) -> Path:
        """The local folder that a version is written to."""
        return self._folder / f"{lineage}.{version}"

    def remove_leftovers(self) -> None:
        """Remove local files of versions that a killed life was writing or removing."""
        remove_leftovers(self._folder)

    def keep(self, weights: WeightsFolder) -> WeightsFolder:
        """Make weights durable: synced here, or uploaded; returns them with the engines' uri.

        Raises:
            OSError: the disk refuses.
            BlobError: the object store refuses, or has been away for too long.
        """
        if self._is_local:
            sync_folder(weights.folder)
            return weights
        base = self._newest
        # Without it, a crash or an error within this upload would leave a chain with a gap.
        self._newest = None
        chained = None if base is None else self._upload_delta(weights, base)
        self._newest = chained or self._upload_whole(weights)
        return self._newest

    def _upload_whole(self, weights: WeightsFolder) -> WeightsFolder:
        name = weights.folder.name
        # The weights last: a reader that finds them finds all files.
        files = sorted(weights.folder.iterdir(), key=lambda path: (path.name == WEIGHTS_FILE, path))
        for path in files:
            self._uploads.put(path, f"{self._root}/{name}/{path.name}")
        return replace(weights, uri=f"{self._uri}/{name}")

    def _upload_delta(self, weights: WeightsFolder, base: WeightsFolder) -> WeightsFolder | None:
        """Upload what changed since `base`; None if a full copy is due, or as small."""
        if len(base.deltas) >= self._deltas_max:
            return None
        file = weights.folder.with_name(f".{weights.folder.name}.delta")
        try:
            with file.open("wb") as draft:
                changes = write_delta(
                    base.folder / WEIGHTS_FILE, weights.folder / WEIGHTS_FILE, draft
                )
            earlier_bytes = sum(delta.size_bytes for delta in base.deltas)
            if earlier_bytes + changes.size_bytes > weights.size_bytes:
                return None
            name = weights.folder.name
            self._uploads.put(file, f"{self._root}/{name}/{DELTA_FILE}")
        except (OtherLayoutError, FileNotFoundError):
            return None
        finally:
            file.unlink(missing_ok=True)
        delta = WeightsDelta(
            sha256=weights.sha256,
            uri=f"{self._uri}/{name}/{DELTA_FILE}",
            size_bytes=changes.size_bytes,
            changed_share=changes.changed / max(1, changes.values),
        )
        self._made_of[name] = self._made_of.get(base.folder.name, frozenset()) | {base.folder.name}
        return replace(
            weights,
            uri=base.uri,
            base_sha256=base.base_sha256 or base.sha256,
            deltas=(*base.deltas, delta),
        )

    def remove_older(self, *, kept: int, besides: frozenset[Path]) -> None:
        """Keep the newest `kept` versions, newer lineages first, and the folders `besides`.

        In an object store those stay too that a version which is kept is made of.

        Raises:
            OSError: the disk refuses.
            BlobError: the object store refuses, or has been away for too long.
        """
        # Local drafts and uploads may differ after a crash: a version is old wherever it lies.
        names = {path.name for path in self._folder.glob("*.*")}
        if not self._is_local:
            names |= self._uploads.names(self._root)
        versions = sorted(filter(_NAME.fullmatch, names), key=_age, reverse=True)
        made_of = (self._made_of.get(name, frozenset()) for name in versions[:kept])
        needed = frozenset[str]().union(*made_of)
        for name in versions[kept:]:
            if self._folder / name not in besides:
                remove_folder(self._folder / name)
                if not self._is_local and name not in needed:
                    self._remove_uploaded(name)

    def _remove_uploaded(self, name: str) -> None:
        self._made_of.pop(name, None)
        self._uploads.remove(f"{self._root}/{name}")


def _age(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("."))
