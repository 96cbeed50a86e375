"""Commands of rank 0 to the other ranks; all ranks carry out every command together."""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from msgspec import Struct

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledStep


class Begin(Struct, frozen=True, kw_only=True, tag=True):
    """Load the model and keep a shard of it.

    Attributes:
        configuration: The run's.
        checkpoint: Folder of the checkpoint to load; "" for the base model.
    """

    configuration: RunConfiguration
    checkpoint: str


class ComputeGradients(Struct, frozen=True, kw_only=True, tag=True):
    """Run this step's forward and backward.

    Attributes:
        scheduled: As rank 0 got it.
        values: Wire bytes of the trees that rank 0 could read, by group id; other groups fail.
    """

    scheduled: ScheduledStep
    values: Mapping[str, bytes]


class Update(Struct, frozen=True, kw_only=True, tag=True):
    """Run the probe over these trees, then end the step: change the weights.

    Attributes:
        fresh: Wire bytes of trees that rank 0 could read.
    """

    fresh: tuple[bytes, ...]


class GatherWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Send the model's shards to rank 0."""


class SaveOptimizer(Struct, frozen=True, kw_only=True, tag=True):
    """Begin to save the optimizer's state, beside what follows."""


class End(Struct, frozen=True, kw_only=True, tag=True):
    """Stop: training is over, or rank 0 got a signal to stop."""


Command: TypeAlias = Begin | ComputeGradients | Update | GatherWeights | SaveOptimizer | End

_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    """The command as bytes, for a process that runs the same version of this package."""
    return msgspec.msgpack.encode(command)


def decode(data: bytes) -> Command:
    """The command in bytes from `encode`."""
    return _DECODER.decode(data)
