"""HTTP connections with deadlines: a request that is only half there is closed.

uvicorn ends a connection that is idle between two requests, and no other. A client that never ends
its headers, or its body, would keep a connection and what it has sent. One that never reads a long
answer would keep its episode too, whose lease runs while a client waits.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from forgemq_gateway.core.held_bytes import HeldBytes, HeldPart
from forgemq_gateway.joined_writes import JoinedWrites
from forgemq_gateway.request_parser import RequestParser

# Headers are one or two packets; a client that needs longer is gone or means harm.
HEADERS_S = 20.0

# For the longest body over a slow network: 6 MB at 100 KB a second.
BODY_S = 60.0

# For the longest answer over a network as slow as that.
WRITE_S = 60.0

# Agents' headers have a few hundred bytes. The parser itself has no limit.
_HEADER_BYTES_MAX = 65_536

# What Python's objects of one header take beside its bytes: a tuple and two byte strings.
_HEADER_OBJECT_BYTES = 128

# In place of how many headers came before the body, while no body is awaited.
_NO_BODY = -1

_LOGGED_EVERY_S = 60.0

LEFT = "forgemq.left"
"""In the scope of a request: a future that is done when its connection is closed."""

# To end a connection takes about 0.05 ms. Those that came at once are late at once.
ENDED_AT_ONCE = 16


class LateConnections:
    """Ends late connections, a few between two steps of other requests."""

    def __init__(self) -> None:
        self._ends: deque[Callable[[], None]] = deque()

    def put(self, end: Callable[[], None]) -> None:
        """Let `end` be called, in the order of `put`."""
        self._ends.append(end)
        if len(self._ends) == 1:
            asyncio.get_running_loop().call_soon(self._end_some)

    def _end_some(self) -> None:
        for _ in range(min(len(self._ends), ENDED_AT_ONCE)):
            self._ends.popleft()()
        if self._ends:
            asyncio.get_running_loop().call_soon(self._end_some)


class DeadlineConnection(HttpToolsProtocol):
    """One connection; each request on it must be complete in time.

    Lifecycle of a request: its headers arrive (`headers_s`), then its body (`body_s`), then it is
    complete, and the time until the next one is the server's `timeout_keep_alive`. A request behind
    one that is still being answered waits for it, so its time begins again.

    Attributes:
        half_sent: Bytes of headers without an end, of all connections.
        late: Those whose deadline is over, of all connections.
    """

    half_sent = HeldBytes()
    late = LateConnections()

    headers_s = HEADERS_S
    body_s = BODY_S
    write_s = WRITE_S

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(*args, **named)
        self.parser: RequestParser = RequestParser(self)
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._seconds = self.headers_s
        self._header_bytes = 0
        self._headers_read = _NO_BODY
        self._has_request = False
        self._answered: RequestResponseCycle | None = None
        self._held = HeldPart(self.half_sent)
        # One for all requests of a connection, in place of a task that waits beside each.
        self._left: asyncio.Future[None] = self.loop.create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request's headers."""
        super().connection_made(JoinedWrites(transport, loop=self.loop))
        self._wait(self.headers_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines, and tell who answers that the client has left."""
        if not self._left.done():
            self._left.set_result(None)
        self._leave_answered()
        self._complete()
        self._end_write()
        self._held.release()
        super().connection_lost(exc)

    def _leave_answered(self) -> None:
        """Tell the request that is being answered: uvicorn tells the one that came last alone."""
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        """Begin to wait for the client to read what is written."""
        super().pause_writing()
        self._end_write()
        self._write_deadline = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read most of it."""
        self._end_write()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first of a request begin its time."""
        if self._deadline is None and self._is_answered():
            self._wait(self.headers_s)
        if self._seconds == self.headers_s:
            self._header_bytes += len(data)
        super().data_received(data)
        if 0 <= self._headers_read < len(self.headers):
            self._count_trailers()
        if self._header_bytes or self._held.size_bytes:
            self._count_half_sent()

    def _count_trailers(self) -> None:
        """Count headers behind a chunked body: they are kept too, and so have the same limit."""
        trailers = self.headers[self._headers_read :]
        self._header_bytes = sum(len(name) + len(value) for name, value in trailers)

    def _count_half_sent(self) -> None:
        """Count headers that did not come whole; those that did, as nearly all, cost nothing."""
        size = self._header_bytes
        if size and self._seconds == self.headers_s:
            # There is no list before the first line.
            size += _HEADER_OBJECT_BYTES * len(self.headers or ())
        self._held.grow(size - self._held.size_bytes)
        if size > _HEADER_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        """Begin to wait for headers, if the request came with the end of the one before it."""
        super().on_message_begin()
        self._headers_read = _NO_BODY
        if self._deadline is None:
            self._wait(self.headers_s)

    def on_headers_complete(self) -> None:
        """Begin to wait for the body, unless the headers are read again without their offer."""
        if self.parser.has_offer():
            return
        self._wait(self.body_s)
        self._header_bytes = 0
        self._headers_read = len(self.headers)
        super().on_headers_complete()
        self.scope[LEFT] = self._left  # type: ignore[literal-required]
        self._has_request = True

    def on_message_complete(self) -> None:
        """The request is there; nothing is awaited from the client until it is answered."""
        if self.parser.has_offer():
            return
        self._complete()
        self._header_bytes = 0
        self._headers_read = _NO_BODY
        super().on_message_complete()

    def _is_answered(self) -> bool:
        return not self._has_request or self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._seconds = seconds
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self.late.put(partial(self._end, self._deadline))

    def _complete(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_write(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _end(self, deadline: asyncio.TimerHandle | None) -> None:
        """Close the connection, unless the late request is behind one that is being answered."""
        if self._deadline is not deadline:
            return  # It became complete while others ended.
        self._deadline = None
        if self.transport.is_closing():
            return
        are_headers_late = self._seconds == self.headers_s
        if self.pipeline or (are_headers_late and not self._is_answered()):
            self._wait(self._seconds)
            return
        if are_headers_late or not self.cycle.response_started:
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
        self.transport.close()


class SparseLog(logging.Filter):
    """Lets each text through once a minute: anybody can make uvicorn log one by a bad request."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this record is the first of its text within a minute; errors always pass."""
        if record.levelno >= logging.ERROR:
            return True
        last_s = self._logged_s.get(record.msg)
        if last_s is not None and record.created - last_s < _LOGGED_EVERY_S:
            return False
        self._logged_s[record.msg] = record.created
        return True
