"""What publishing a version takes of memory is a metric."""

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.storage.weights import SavedVersion, WeightsFolder
from forgemq_trainer.transfer_deadline import TransferDeadline
from tests.unit.trainer.publisher_scene import publishing

COPIED_BYTES = 192_000_000


class CopyingPaths(FastPaths):
    """Broadcasts to no lane, and says how much of the file it copied."""

    def send(self, *_: object) -> dict[int, str]:
        self.copied_bytes_peak = COPIED_BYTES
        return {}


class KeptGauges:
    """An exporter that keeps the newest value of each gauge."""

    address = ""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def count(self, *_: object) -> None: ...

    def gauge(self, metric: str, value: float, attributes: dict[str, Any]) -> None:
        del attributes
        self.values[metric] = value

    def observe(self, *_: object) -> None: ...

    def span(self, *_: object, **__: object) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def close(self) -> None: ...


async def test_copies_of_a_broadcast_are_counted(tmp_path: Path) -> None:
    gauges = KeptGauges()
    telemetry = Telemetry(service="trainer", exporter=gauges, stream=io.StringIO())  # type: ignore[arg-type]
    paths = CopyingPaths(host="127.0.0.1", backend="gloo", deadline=TransferDeadline(1.0, 1e9))
    weights = WeightsFolder(folder=tmp_path, uri=str(tmp_path), sha256="", size_bytes=0)
    async with publishing(tmp_path, paths, telemetry=telemetry) as publisher:
        await publisher._send((), SavedVersion(version=1, weights=weights))
    assert gauges.values == {"trainer.copied_bytes": COPIED_BYTES}
