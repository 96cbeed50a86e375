"""What rank 0 tells the other ranks; every command is carried out by all ranks together."""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from msgspec import Struct

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledStep


class Begin(Struct, frozen=True, kw_only=True, tag=True):
    """Load the model from a checkpoint's folder, "" for the base model, and take a shard of it."""

    configuration: RunConfiguration
    checkpoint: str


class TrainStep(Struct, frozen=True, kw_only=True, tag=True):
    """Train this step; `values` are the trees' wire bytes by group id."""

    scheduled: ScheduledStep
    values: Mapping[str, bytes]


class GatherWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Give the model's shards."""


class GatherOptimizer(Struct, frozen=True, kw_only=True, tag=True):
    """Give the optimizer's shards."""


class End(Struct, frozen=True, kw_only=True, tag=True):
    """Training is over, or was told to stop."""


Command: TypeAlias = Begin | TrainStep | GatherWeights | GatherOptimizer | End

_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    """The command between processes of one version of this package."""
    return msgspec.msgpack.encode(command)


def decode(data: bytes) -> Command:
    """The command in these bytes."""
    return _DECODER.decode(data)
