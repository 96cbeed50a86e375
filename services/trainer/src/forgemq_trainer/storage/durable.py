"""Where engines read weights: `weights/<run>/<lineage>.<version>/` beside the run's blobs.

Engines and their inference processes read the model and the blobs, never the trainer's own folder
of checkpoints. If the blobs are in a local folder (a shared volume), weights are written there and
published as a plain path, which SGLang loads directly. If they are in an object store, the folder
is written locally and uploaded.
"""

import re
from dataclasses import replace
from pathlib import Path

import fsspec

from forgemq_trainer.storage.folders import remove_folder
from forgemq_trainer.storage.weights import WEIGHTS_FILE, WeightsFolder

_NAME = re.compile(r"(\d+)\.(\d+)")


class DurableWeights:
    """The published versions of one run.

    Example: blobs at `s3://b/r`, run `r`: version 3 of lineage 1 is written below `drafts`, and
    uploaded to `s3://b/r/weights/r/1.3/`.
    """

    def __init__(self, blobs: str, *, run: str, drafts: Path) -> None:
        """Write nothing yet.

        Args:
            blobs: The run's blobs, as an fsspec address.
            run: Its id.
            drafts: Local folder for versions to upload; unused if the blobs are local.
        """
        self._filesystem, root = fsspec.core.url_to_fs(blobs)
        self._is_local = "file" in self._filesystem.protocol
        self._root = f"{root.rstrip('/')}/weights/{run}"
        self._uri = f"{blobs.rstrip('/')}/weights/{run}"
        self._folder = Path(self._root) if self._is_local else drafts

    def local_folder(self, *, lineage: int, version: int) -> Path:
        """The local folder that a version is written to."""
        return self._folder / f"{lineage}.{version}"

    def upload(self, weights: WeightsFolder) -> WeightsFolder:
        """Upload the weights if the blobs are remote; returns them with the uri that engines read.

        Raises:
            OSError: the object store refuses.
        """
        if self._is_local:
            return weights
        name = weights.folder.name
        # The weights last: a reader that finds them finds all files.
        files = sorted(weights.folder.iterdir(), key=lambda path: (path.name == WEIGHTS_FILE, path))
        for path in files:
            self._filesystem.put_file(str(path), f"{self._root}/{name}/{path.name}")
        return replace(weights, uri=f"{self._uri}/{name}")

    def remove_older(self, *, kept: int, besides: frozenset[Path]) -> None:
        """Keep the newest `kept` versions, newer lineages first, and the folders `besides`."""
        # Local drafts and uploads may differ after a crash: a version is old wherever it lies.
        names = {path.name for path in self._folder.glob("*.*")}
        if not self._is_local and self._filesystem.exists(self._root):
            # fsspec caches listings, and would not show what another process has uploaded.
            self._filesystem.invalidate_cache(self._root)
            names |= {Path(path).name for path in self._filesystem.ls(self._root, detail=False)}
        versions = sorted(filter(_NAME.fullmatch, names), key=_age, reverse=True)
        for name in versions[kept:]:
            if self._folder / name not in besides:
                self._remove(name)

    def _remove(self, name: str) -> None:
        remove_folder(self._folder / name)
        if not self._is_local and self._filesystem.exists(f"{self._root}/{name}"):
            self._filesystem.rm(f"{self._root}/{name}", recursive=True)


def _age(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("."))
