"""A log whose large values lie in files, and how a test loses one."""

from pathlib import Path

from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.payloads import reference_of

INLINE_BYTES_MAX = 8
"""Nearly every value is a blob."""


class LosingStore(BlobStore):
    """A store of one run in a folder; `lose_newest` deletes what was put last."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), run="r")
        self.newest = ""
        self._saved: dict[str, bytes] = {}

    def _put(self, data: bytes):
        reference = super()._put(data)
        self.newest = reference.uri
        return reference

    def lose(self, uri: str) -> None:
        """Delete this blob."""
        self._saved[uri] = Path(uri).read_bytes()
        Path(uri).unlink()

    def lose_newest(self) -> None:
        """Delete the blob that was put last."""
        self.lose(self.newest)

    def find_again(self) -> None:
        """Bring back what was lost."""
        for name, data in self._saved.items():
            Path(name).write_bytes(data)


def log_with(store: BlobStore, **options) -> MemoryLog:
    return MemoryLog(run="r", blobs=store, inline_bytes_max=INLINE_BYTES_MAX, **options)


async def write_lost(log: MemoryLog, store: LosingStore, emit: Emit) -> int:
    """Write a record whose value is lost before anybody reads it; returns its offset."""
    writer = await log.writer()
    offset = await writer.write(emit)
    # Not the newest blob: a service beside may have put another one.
    store.lose(await blob_of(log, emit.place, offset))
    await writer.close()
    return offset


async def blob_of(log: MemoryLog, place: Place, offset: int) -> str:
    """The file of a record's value."""
    reader = await log.reader({place: offset}, has_values=False)
    [record] = await reader.read(timeout_s=0, records_max=1)
    await reader.close()
    reference = reference_of(record)
    assert reference is not None
    return reference.uri
