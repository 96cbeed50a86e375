"""A record of an episode that does not decode fails its group, so that the group's slot ends."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from forgemq.bus.log import Record
from forgemq.contracts import topics
from forgemq.contracts.groups import ScoredGroup
from forgemq.contracts.messages import Output
from forgemq.contracts.run import RunConfiguration


class _Readable(msgspec.Struct):
    """What is left to read of a record that breaks another rule."""

    domain: str = ""
    purpose: Literal["train", "eval"] = "train"


class FailedGroups:
    """Turns a bad episode record into the failure of its group; pure.

    The key of finished-episodes and graded-episodes is the episode id, and its head is the group
    id. Domain and purpose come from the bytes where they can be read; else the first queue stands
    in: the scheduler goes by the group id alone.
    """

    def __init__(self, configuration: RunConfiguration) -> None:
        self._domains = tuple(queue.domain for queue in configuration.queues)

    def __call__(self, record: Record, reason: str) -> Sequence[Output]:
        """The failed group, or nothing where the key tells none."""
        if record.topic not in (topics.FINISHED_EPISODES.name, topics.GRADED_EPISODES.name):
            return ()
        group_id = record.key.decode(errors="replace").rsplit(".", 2)[0]
        try:
            readable = _READABLE.decode(record.value)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            readable = _Readable()
        domain = readable.domain if readable.domain in self._domains else self._domains[0]
        scored = ScoredGroup(
            group_id=group_id,
            domain=domain,
            purpose=readable.purpose,
            episodes=(),
            not_trainable="failed",
            detail=f"{record.topic} at offset {record.offset} is no record: {reason}"[:500],
        )
        try:
            topics.decode(topics.SCORED_GROUPS, topics.encode(scored))
        except msgspec.ValidationError:
            return ()  # the key is no episode id
        return (Output(topic=topics.SCORED_GROUPS.name, partition=record.partition, record=scored),)


_READABLE = msgspec.msgpack.Decoder(_Readable)
