"""What a pure core takes and gives: decoded records and ticks in, records out.

Cores import this and nothing of the bus or the shell; the shell turns log records into messages
and outputs into log records.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct


class Message(Struct, frozen=True, kw_only=True):
    """One decoded record and where it stood."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    record: Struct


class Tick(Struct, frozen=True, kw_only=True):
    """Time as an input: monotonic over the run, standing still while the service is down."""

    run_ms: int


class Output(Struct, frozen=True, kw_only=True):
    """One record to write; the shell takes the key from the field the registry names."""

    topic: str
    partition: int
    record: Struct


Event: TypeAlias = Message | Tick


class InvalidRecordError(Exception):
    """This record contradicts the log before it; the shell sends it to the DLQ."""


class Core(Protocol):
    """A deterministic state machine: outputs are a function of the events so far, byte for byte."""

    def handle(self, event: Event) -> Sequence[Output]:
        """Consume one event; return what to write, in order.

        Raises:
            InvalidRecordError: before any change of state.
        """
        ...

    def snapshot(self) -> bytes:
        """All state; equal states give equal bytes, whatever order built them."""
        ...

    def restore(self, snapshot: bytes) -> None:
        """Replace all state with an earlier `snapshot()`."""
        ...
