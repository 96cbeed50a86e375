"""A scored group that does not decode fails, so that its slot ends."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from forgemq.bus.log import Record
from forgemq.contracts import topics
from forgemq.contracts.groups import MergedGroup
from forgemq.contracts.messages import Output
from forgemq.contracts.run import RunConfiguration


class _Readable(msgspec.Struct):
    """What is left to read of a record that breaks another rule."""

    domain: str = ""
    purpose: Literal["train", "eval"] = "train"


class FailedGroups:
    """Turns a bad record of scored-groups into a merged group that cannot train; pure.

    The key is the group id. Domain and purpose come from the bytes where they can be read; else
    the first queue stands in: the scheduler goes by the group id alone.
    """

    def __init__(self, configuration: RunConfiguration) -> None:
        self._domains = tuple(queue.domain for queue in configuration.queues)

    def __call__(self, record: Record, reason: str) -> Sequence[Output]:
        """The failed group, or nothing where the key tells none."""
        if record.topic != topics.SCORED_GROUPS.name:
            return ()
        try:
            readable = _READABLE.decode(record.value)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            readable = _Readable()
        merged = MergedGroup(
            group_id=record.key.decode(errors="replace"),
            domain=readable.domain if readable.domain in self._domains else self._domains[0],
            purpose=readable.purpose,
            partition=record.partition,
            not_trainable="failed",
            detail=f"{record.topic} at offset {record.offset} is no record: {reason}"[:500],
        )
        try:
            topics.decode(topics.MERGED_GROUPS, topics.encode(merged))
        except msgspec.ValidationError:
            return ()  # the key is no group id
        return (Output(topic=topics.MERGED_GROUPS.name, partition=record.partition, record=merged),)


_READABLE = msgspec.msgpack.Decoder(_Readable)
