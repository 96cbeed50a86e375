"""What goes into a pure core and comes out: records and ticks in, records out.

Cores import this, and neither bus nor shell: the shell turns log records into messages and
outputs into log records.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from msgspec import Struct


class Message(Struct, frozen=True, kw_only=True):
    """One decoded record, and where on the log it is."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    record: Struct


class Tick(Struct, frozen=True, kw_only=True):
    """Run time as an input: never goes back, and stands still while the service is down."""

    run_ms: int


class Output(Struct, frozen=True, kw_only=True):
    """One record to write; its key is the field that the topic registry names."""

    topic: str
    partition: int
    record: Struct


Event: TypeAlias = Message | Tick


class InvalidRecordError(Exception):
    """The record contradicts the log before it; the shell writes a dead letter."""


class References(Struct, frozen=True, kw_only=True):
    """Records of one partition that a state names instead of containing them."""

    topic: str
    partition: int
    offsets: tuple[int, ...]


class Core(Protocol):
    """A deterministic state machine: outputs are a function of the events so far, byte for byte."""

    def handle(self, event: Event) -> Sequence[Output]:
        """Apply one event; return what to write, in order.

        Raises:
            InvalidRecordError: Before any change of state.
        """
        ...

    def snapshot(self) -> bytes:
        """All state; equal states give equal bytes, in whatever order they were built."""
        ...

    def restore(self, snapshot: bytes) -> None:
        """Replace all state with that of a `snapshot()`."""
        ...


@runtime_checkable
class RecallingCore(Core, Protocol):
    """A core whose snapshots are small because they name large records.

    After `restore` it gets each of these records again by `recall`, in offset order, before any
    event. They stay on the log as long as a kept snapshot names them.
    """

    def references(self) -> Sequence[References]:
        """The records that a snapshot of the present state names; offsets ascend."""
        ...

    def recall(self, message: Message) -> None:
        """Take back one of them."""
        ...
