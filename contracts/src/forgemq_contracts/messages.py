"""What goes into a pure core and comes out: records and ticks in, records out.

Cores import this, and neither bus nor shell: the shell turns log records into messages and
outputs into log records.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

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
