"""What a bad record still tells about its group, for services that let the group fail."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from forgemq.bus.log import Record
from forgemq.contracts import topics
from forgemq.contracts.messages import Output
from forgemq.contracts.run import RunConfiguration


class FailedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Domain and purpose of the group, and why it failed."""

    domain: str
    purpose: Literal["train", "eval"]
    detail: str


class _Readable(msgspec.Struct):
    """What is left to read of a record that breaks another rule."""

    domain: str = ""
    purpose: Literal["train", "eval"] = "train"


def failed_group(record: Record, reason: str, *, configuration: RunConfiguration) -> FailedGroup:
    """What is known of the group of a bad record; pure.

    Domain and purpose come from the bytes where they can be read; else the first queue stands in:
    the scheduler goes by the group id alone.
    """
    try:
        readable = _READABLE.decode(record.value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        readable = _Readable()
    domains = [queue.domain for queue in configuration.queues]
    return FailedGroup(
        domain=readable.domain if readable.domain in domains else domains[0],
        purpose=readable.purpose,
        detail=f"{record.topic} at offset {record.offset} is no record: {reason}"[:500],
    )


def if_valid(output: Output) -> Sequence[Output]:
    """This output, or nothing where it breaks its own rules: a bad key gives no id of a group."""
    try:
        topics.decode(topics.BY_NAME[output.topic], topics.encode(output.record))
    except msgspec.ValidationError:
        return ()
    return (output,)


_READABLE = msgspec.msgpack.Decoder(_Readable)
