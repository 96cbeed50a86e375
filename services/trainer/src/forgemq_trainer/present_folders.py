"""Waits for the folders that a version is written to.

A folder that was mounted and is so no more is an empty one, or can be made again: what is written
there lies below the mount point, where neither engines nor this trainer's next life find it.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.core.store_patience import StorePatience
from forgemq_trainer.storage.folders import is_lock_there


class PresentFolders:
    """The run's blobs, if they are in a local folder, and the trainer's own folder."""

    def __init__(
        self,
        blobs: BlobStore,
        folder: Path,
        *,
        telemetry: Telemetry,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Look at nothing yet.

        Args:
            blobs: Of the run.
            folder: The trainer's, which is locked.
            telemetry: For an event at each look that finds a folder missing.
            is_stopping: Whether the trainer is to stop; then no folder is waited for.
        """
        self._blobs = blobs
        self._folder = folder
        self._telemetry = telemetry
        self._is_stopping = is_stopping

    async def wait(self) -> None:
        """Return once both are there.

        Raises:
            BlobError: the blobs' has been away for too long.
            FileNotFoundError: the trainer's has.
        """
        patience = StorePatience()
        while True:
            try:
                await self._blobs.check_folder()
                await asyncio.to_thread(self._check_own)
            except (BlobError, FileNotFoundError) as error:
                delay_s = patience.delay_s(now_s=asyncio.get_running_loop().time())
                if delay_s is None or self._is_stopping():
                    raise
                self._telemetry.event("folder_missing", error=str(error))
            else:
                return
            await asyncio.sleep(delay_s)

    def _check_own(self) -> None:
        if not is_lock_there(self._folder):
            raise FileNotFoundError(
                f"{self._folder} has not the lock of this trainer: is the folder mounted?"
            )
