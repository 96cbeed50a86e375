"""Bytes of requests' bodies in memory: counted from their first byte until they are answered."""

from collections.abc import Callable
from typing import Self

from forgemq_gateway.core.errors import RefusedError, busy


class BodyMemory:
    """What all open bodies take, beside histories and half-sent headers, within one limit.

    Example: `with memory.body() as body:`, then `body.grow(len(part))` for each part.

    Args:
        bytes_max: Of all together; at more, the next bytes are refused.
        other_bytes: What the others take now.
    """

    def __init__(self, *, bytes_max: int, other_bytes: Callable[[], int]) -> None:
        self._bytes_max = bytes_max
        self._other_bytes = other_bytes
        self.held_bytes = 0

    def body(self) -> "CountedBody":
        """One body; its bytes are given back when the context ends."""
        return CountedBody(self)

    def check(self) -> None:
        """Return if there is room.

        Raises:
            RefusedError: 503, there is none.
        """
        if self.held_bytes + self._other_bytes() > self._bytes_max:
            raise _full()


class CountedBody:
    """The bytes of one body so far."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.size_bytes = 0
        self.body = b""
        """The whole body once it is read: another gateway may have to answer it."""

    def __enter__(self) -> Self:
        """Begin to count."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the bytes back."""
        self._memory.held_bytes -= self.size_bytes

    def grow(self, count: int) -> None:
        """Count more bytes.

        Raises:
            RefusedError: 503, there is no room for them.
        """
        self.size_bytes += count
        self._memory.held_bytes += count
        self._memory.check()


def _full() -> RefusedError:
    return busy(
        "the histories of open groups and open requests fill the gateway's memory",
        status=503,
        retry_after_s=5,
    )
