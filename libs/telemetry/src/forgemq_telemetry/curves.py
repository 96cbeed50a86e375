"""Curves of a run: one JSON line a step, and TensorBoard files on request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

CurveFormat: TypeAlias = Literal["jsonl", "tensorboard"]


class Curves:
    """Appends the values of each step to `<folder>/curves.jsonl`.

    A process that dies while it writes leaves half a line; the next writer ends that line, and
    `read_curves` skips it. A resumed run may write a step again: the later line counts.

    Args:
        folder: Created if it does not exist.
        formats: `tensorboard` also writes event files there; needs the package `tensorboard`.
    """

    def __init__(self, folder: Path, *, formats: tuple[CurveFormat, ...] = ("jsonl",)) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "curves.jsonl").open("ab+")
        self._end_torn_line()
        self._events = _EventFile(folder) if "tensorboard" in formats else None

    def _end_torn_line(self) -> None:
        if self._file.tell() == 0:
            return
        self._file.seek(-1, 2)
        if self._file.read(1) != b"\n":
            self._file.write(b"\n")

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Append the values of this step; other processes can read them afterwards.

        None stands for what the step did not measure: null in the file, and no point of a curve.
        """
        self._file.write(msgspec.json.encode({"step": step, **values}) + b"\n")
        self._file.flush()
        if self._events is not None:
            measured = {name: value for name, value in values.items() if value is not None}
            self._events.write(step, measured)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_curves(folder: Path) -> dict[int, dict[str, float]]:
    """Read the values by step, in order; the later line of a step counts."""
    curves: dict[int, dict[str, float]] = {}
    for line in (folder / "curves.jsonl").read_bytes().splitlines():
        try:
            values = msgspec.json.decode(line, type=dict[str, float | None])
        except msgspec.DecodeError:
            continue
        step = values.pop("step")
        if step is not None:
            curves[int(step)] = {k: float("nan") if v is None else v for k, v in values.items()}
    return dict(sorted(curves.items()))


class _EventFile:
    """TensorBoard's event file, written without torch."""

    def __init__(self, folder: Path) -> None:
        # Imported here: only a run that asks for TensorBoard needs the package.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self._writer.add_event(self._event(step=step, summary=self._summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
