"""One connection that waits for an answer: a stream or one JSON object, or a refusal."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from msgspec import Struct

from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.replies import Answer, Reply
from forgemq_gateway.core.requests import Request
from forgemq_gateway.wire import ClientGoneError, Send, json_start, send_refusal
from forgemq_gateway.wire_protocol import WireProtocol, WireStream

# The end of an answer is sent when all before it is on its way and its delivery is on the log: a
# client that left in the meantime does not count as served. Small enough for any socket buffer.
_LAST_WRITE_BYTES = 65_536

RecordDelivery: TypeAlias = Callable[[], Awaitable[None]]


class Client(Struct, kw_only=True, eq=False):
    """A connection whose request is accepted."""

    protocol: WireProtocol
    request: Request
    send: Send
    leaving: "asyncio.Future[None]"
    """Done when its connection is closed, or the gateway ends."""
    stream: WireStream
    has_opened: bool = False
    has_end_begun: bool = False
    """Whether the client has a piece of the answer's end, which may be half an event."""
    written: Reply = Reply()
    """What the client has of a reply that is still sampled."""

    async def keep_alive(self, *, request_id: str, created_s: int) -> None:
        """Tell the client of a stream that its answer is being made."""
        await self._open_stream(request_id)
        data = self.stream.keep_alive(
            request_id=request_id, created_s=created_s, model=self.request.model
        )
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def write_more(self, answer: Answer) -> None:
        """Write what an unfinished answer has beyond what was written."""
        await self._open_stream(answer.request_id)
        self.written = answer.reply
        data = self.stream.more(answer)
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def refuse(self, error: RefusedError) -> None:
        """Send the refusal: an event if the stream is open, else an HTTP error."""
        if self.has_opened:
            data = self.stream.fail(error)
            await self.send({"type": "http.response.body", "body": data})
        else:
            await send_refusal(self.send, error, shape=self.protocol.error)

    async def write(self, data: bytes, record: RecordDelivery, *, request_id: str) -> None:
        """Write an answer; its end goes out when `record` has put the delivery on the log."""
        begin, end = data[:-_LAST_WRITE_BYTES], data[-_LAST_WRITE_BYTES:]
        if begin:
            self.has_end_begun = True
            await self._open(len(data), request_id=request_id)
            await self.send({"type": "http.response.body", "body": begin, "more_body": True})
        try:
            await record()
        except ClientGoneError:
            return
        # The head goes with the end: one packet (joined_writes.py).
        await self._open(len(data), request_id=request_id)
        await self.send({"type": "http.response.body", "body": end})

    async def _open(self, size_bytes: int, *, request_id: str) -> None:
        """Send the head of the answer, unless that was done."""
        if self.request.is_stream:
            await self._open_stream(request_id)
        elif not self.has_opened:
            self.has_opened = True
            headers = self._headers(request_id)
            await self.send(json_start(size_bytes, headers=headers))

    async def _open_stream(self, request_id: str) -> None:
        if self.has_opened:
            return
        self.has_opened = True
        own = self._headers(request_id).items()
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode()) for name, value in own),
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    def _headers(self, request_id: str) -> dict[str, str]:
        """The id of the answer, and what the client set and the episode decides."""
        unused = self.request.unused
        return {
            "x-request-id": request_id,
            **({"x-forgemq-unused": ", ".join(unused)} if unused else {}),
        }
