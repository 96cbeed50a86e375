"""Sends what is written in one turn of the event loop at once.

uvicorn writes the head of an answer and its body apart. Each write is a call of the system and a
packet that wakes the client, and together they cost as much as to read the request.
"""

import asyncio
from typing import Any

# More is not copied once again, and the transport must see it to slow the writer down.
_JOINED_BYTES_MAX = 65_536


class JoinedWrites(asyncio.Transport):
    """A transport in front of another one."""

    def __init__(self, transport: asyncio.Transport, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: Any) -> None:  # noqa: ANN401 - asyncio's
        """Write at the next turn of the loop, behind what is written before."""
        self._parts.append(bytes(data))
        self._size += len(data)
        if self._size > _JOINED_BYTES_MAX:
            self._flush()
        elif len(self._parts) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        # A connection that was reset meanwhile takes no more, and uvloop's says so by an error.
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Send what is written, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._parts, self._size = [], 0
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Read nothing for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - asyncio's
        """What the connection says about itself."""
        return self._transport.get_extra_info(name, default)
