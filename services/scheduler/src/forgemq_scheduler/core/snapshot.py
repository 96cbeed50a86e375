"""The scheduler's state as bytes: plain tuples in an order that the state alone decides."""

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from forgemq_contracts.groups import MergedGroup, RequestedGroup
from forgemq_contracts.lanes import KnownLane, WeightsId
from forgemq_contracts.steps import ScheduledGroup

GroupPhase: TypeAlias = Literal["unclaimed", "playing", "closed"]
"""unclaimed: no agent has begun an episode. closed: past its deadline, to be scored as it is."""


class Choice(Struct, frozen=True, kw_only=True):
    """Which task of a curriculum a group plays; how its episodes ended, once it is merged."""

    number: int
    task_number: int
    version: int
    scored: int = 0
    solved: int = 0


class OpenGroup(Struct, frozen=True, kw_only=True):
    """An admitted group that is not retired.

    Attributes:
        deadline_ms: Of its phase: to be claimed, to be played, to be scored once it is closed.
        failure: Which of its records is bad, if that became known after a step had taken it.
        choice: None if no curriculum asked for it.
    """

    group_id: str
    queue: int
    queue_index: int | None
    deadline_ms: int
    failure: str = ""
    phase: GroupPhase = "playing"
    choice: Choice | None = None


class TakenStep(Struct, frozen=True, kw_only=True):
    """A scheduled step: its groups, and the slots it holds in each queue until it serves."""

    step: int
    group_ids: tuple[str, ...]
    slots: tuple[int, ...]


class QueueSnapshot(Struct, frozen=True, kw_only=True):
    """One queue: groups by queue index; waiting requests and finished groups, oldest first."""

    waiting: tuple[RequestedGroup, ...]
    groups: tuple[OpenGroup, ...]
    next_index: int
    order: tuple[int, ...]
    taken: tuple[int, ...]
    finished: tuple[tuple[int, MergedGroup], ...]
    forming: tuple[ScheduledGroup, ...]
    results: int = 0


class SchedulerSnapshot(Struct, frozen=True, kw_only=True):
    """All state of the core."""

    now_ms: int
    lanes: tuple[KnownLane, ...]
    served: WeightsId | None
    lineage: int
    steps_scheduled: int
    steps_trained: int
    checkpoint_step: int
    scheduled: tuple[TakenStep, ...]
    holding: tuple[TakenStep, ...]
    queues: tuple[QueueSnapshot, ...]
    evaluations_waiting: tuple[RequestedGroup, ...]
    evaluations: tuple[OpenGroup, ...]
    retired: bytes
    asked: bytes = b""

    def to_bytes(self) -> bytes:
        """The snapshot's bytes; equal states have equal ones."""
        return _ENCODER.encode(self)

    @staticmethod
    def of(snapshot: bytes) -> "SchedulerSnapshot":
        """The state in the bytes of a snapshot."""
        return _DECODER.decode(snapshot)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SchedulerSnapshot)
