"""The first steps of a real run, which a GPU trains again without a broker or an engine.

`record_run.py` writes the file.
"""

import lzma
from pathlib import Path

import msgspec

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.trees import MergedTree

FILE = Path(__file__).with_name("recorded_run.msgpack.xz")


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer of a run read, and what it wrote.

    Attributes:
        configuration: Of the run; `model.path` is relative to the repository.
        scheduled: The first steps, in order.
        trees: Of their groups.
        trained: What the run's trainer measured in each of these steps.
    """

    configuration: RunConfiguration
    scheduled: tuple[ScheduledStep, ...]
    trees: tuple[MergedTree, ...]
    trained: tuple[TrainedStep, ...]


def recorded_run() -> RecordedRun:
    """The run that is kept beside this file."""
    return msgspec.msgpack.decode(lzma.decompress(FILE.read_bytes()), type=RecordedRun)


def write_recorded_run(recorded: RecordedRun) -> None:
    """Replace the run that is kept beside this file."""
    FILE.write_bytes(lzma.compress(msgspec.msgpack.encode(recorded), preset=9))
