"""Bytes of requests' bodies in memory: counted from their first byte until they are answered."""

from collections.abc import Callable, Mapping
from typing import Self

from forgemq_gateway.core.errors import CONTEXT_FULL_CODE, RefusedError, busy
from forgemq_gateway.wire import Receive, read_body


class BodyMemory:
    """What all open bodies take, beside histories and half-sent headers, within one limit.

    Example: `with memory.body() as body:`, then `await body.read(receive, headers=...)`.

    Args:
        bytes_max: Of all together; at more, the next bytes are refused.
        body_bytes_max: Of one body.
        other_bytes: What the others take now.
    """

    def __init__(
        self, *, bytes_max: int, body_bytes_max: int, other_bytes: Callable[[], int]
    ) -> None:
        self._bytes_max = bytes_max
        self.body_bytes_max = body_bytes_max
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

    async def read(self, receive: Receive, *, headers: Mapping[str, str]) -> bytes:
        """Read the whole body of a request for a completion.

        Raises:
            RefusedError: 413, it is too long for any context; 503, there is no room for it.
            ClientGoneError: the connection closed.
        """
        self.body = await read_body(
            receive,
            bytes_max=self._memory.body_bytes_max,
            headers=headers,
            code=CONTEXT_FULL_CODE,  # Agents shorten their history when they read it.
            grow=self.grow,
        )
        return self.body

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
