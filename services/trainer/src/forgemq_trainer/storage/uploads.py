"""Uploads into the object store of a run's blobs; a store that is away is waited for."""

import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from fsspec import AbstractFileSystem

from forgemq_bus.blobs import store_errors, store_refusals
from forgemq_bus.errors import BlobError
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.core.store_patience import StorePatience

_T = TypeVar("_T")

LOOK_EVERY_S = 0.5
"""How late a wait for the store sees that the trainer is to stop."""


class Uploads:
    """Folders of one object store.

    Its methods block, while the store is away for up to `AWAY_S_MAX`; each failed try is an event.
    """

    def __init__(
        self,
        filesystem: AbstractFileSystem,
        *,
        telemetry: Telemetry,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Ask nothing yet.

        Args:
            filesystem: Of fsspec.
            telemetry: For the events.
            is_stopping: Whether the trainer is to stop; then the store is not waited for.
        """
        self._filesystem = filesystem
        self._refusals = store_refusals(filesystem)
        self._errors = store_errors(filesystem)
        self._telemetry = telemetry
        self._is_stopping = is_stopping

    def put(self, file: Path, path: str) -> None:
        """Upload a file.

        Raises:
            BlobError: the store refuses or does not answer.
        """
        self._until_answered(
            f"cannot upload {path}", lambda: self._filesystem.put_file(str(file), path)
        )

    def names(self, folder: str) -> set[str]:
        """Names of the folders and files in a folder; none if it is not there.

        Raises:
            BlobError: the store refuses or does not answer.
        """

        def listed() -> set[str]:
            if not self._filesystem.exists(folder):
                return set()
            # fsspec caches listings, and would not show what another process has uploaded.
            self._filesystem.invalidate_cache(folder)
            found = self._filesystem.ls(folder, detail=False)
            return {PurePosixPath(path).name for path in found}

        return self._until_answered(f"cannot list {folder}", listed)

    def remove(self, folder: str) -> None:
        """Delete a folder with all that is in it, if it is there.

        Raises:
            BlobError: the store refuses or does not answer.
        """

        def remove() -> None:
            if self._filesystem.exists(folder):
                self._filesystem.rm(folder, recursive=True)

        self._until_answered(f"cannot delete {folder}", remove)

    def _until_answered(self, failure: str, ask: Callable[[], _T]) -> _T:
        patience = StorePatience()
        while True:
            try:
                return ask()
            except self._refusals as error:
                raise BlobError(f"{failure}: {error}") from error
            except self._errors as error:
                delay_s = patience.delay_s(now_s=time.monotonic())
                if delay_s is None or self._is_stopping():
                    raise BlobError(f"{failure}: {error}") from error
                self._telemetry.event("object_store_away", error=f"{failure}: {error}")
            self._pause(delay_s)

    def _pause(self, delay_s: float) -> None:
        end_s = time.monotonic() + delay_s
        while (left_s := end_s - time.monotonic()) > 0 and not self._is_stopping():
            time.sleep(min(left_s, LOOK_EVERY_S))
