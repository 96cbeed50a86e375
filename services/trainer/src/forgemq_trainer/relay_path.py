"""Relays new weights to lanes: the files, to the first lane's process, which passes them on.

The trainer reads the files it has written, so that nothing is copied in its memory, and sends them
once, however many lanes there are (`forgemq_weight_relay`).
"""

import threading
from pathlib import Path

from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.storage.folders import file_sha256
from forgemq_trainer.storage.weights import WEIGHTS_FILE, SavedVersion, WeightsFolder
from forgemq_trainer.transfer_deadline import TransferDeadline
from forgemq_weight_relay import Greeting, Hop, Relayed, RelayedFile, StagedCopy, send_along


class RelayPath:
    """Sends one version after another; `close` breaks off the one under way."""

    def __init__(self, *, deadline: TransferDeadline) -> None:
        """Send nothing yet; `deadline` is for a whole version on its whole route."""
        self._deadline = deadline
        self._stop = threading.Event()

    def send(
        self, written: SavedVersion, *, run: str, lineage: int, route: tuple[Hop, ...]
    ) -> Relayed:
        """Send all files of a version to the first lane of the route that takes them. Blocks.

        Raises:
            OSError: a file cannot be read.
        """
        folders = {"policy": written.weights}
        if written.head is not None:
            folders["head"] = written.head
        paths = {
            f"{kind}/{path.name}": (path, _described(f"{kind}/{path.name}", path, weights))
            for kind, weights in folders.items()
            for path in _files(weights.folder)
        }
        files = tuple(file for _, file in paths.values())
        copy = StagedCopy.of_files({name: path for name, (path, _) in paths.items()}, files)
        greeting = Greeting(
            run=run,
            lineage=lineage,
            version=written.version,
            files=files,
            route=route,
            seconds_left=self._deadline.of(copy.size_bytes),
        )
        return send_along(copy, greeting, stop=self._stop)

    def close(self) -> None:
        """Break off what is being sent, at its next part."""
        self._stop.set()


def relay_of(settings: TrainerSettings) -> RelayPath | None:
    """The relay; None if the settings name another way."""
    if settings.fast_path != "relay":
        return None
    return RelayPath(deadline=TransferDeadline.of_settings(settings))


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."]


def _described(name: str, path: Path, weights: WeightsFolder) -> RelayedFile:
    if path.name == WEIGHTS_FILE:
        return RelayedFile(name, weights.size_bytes, weights.sha256)
    return RelayedFile(name, path.stat().st_size, file_sha256(path))
