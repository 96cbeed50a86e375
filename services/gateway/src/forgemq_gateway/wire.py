"""Plain ASGI: read a body, send a JSON answer, send a refusal."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

import orjson

from forgemq_gateway.core.errors import RefusedError

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HasLeft: TypeAlias = Callable[[], bool]
"""Whether the client of a request has closed its connection."""

# Beside what ASGI puts into a scope.
_READ_HEADERS = "forgemq.headers"

Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientGoneError(Exception):
    """The client closed its connection before its request was complete."""


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Request headers by name in lower case; a repeated header has its last value."""
    # Several parts ask for them, each for one or two.
    known: Mapping[str, str] | None = scope.get(_READ_HEADERS)
    if known is None:
        raw = scope["headers"]
        known = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}
        scope[_READ_HEADERS] = known
    return known


async def read_body(
    receive: Receive,
    *,
    bytes_max: int,
    headers: Mapping[str, str],
    code: str | None = None,
    grow: Callable[[int], None] = lambda _: None,
) -> bytes:
    """Read the whole body.

    Args:
        receive: Of the connection.
        bytes_max: The longest body.
        headers: Of the request.
        code: Of the refusal, for programs.
        grow: Called with the size of each part before it is kept; may refuse it.

    Raises:
        RefusedError: 413: it is longer than the limit; nothing beyond it is kept. Or as `grow`.
        ClientGoneError: the connection closed.
    """
    declared = headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > bytes_max:
        raise _too_long(bytes_max, code=code)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise _too_long(bytes_max, code=code)
        grow(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_long(bytes_max: int, *, code: str | None) -> RefusedError:
    return RefusedError(
        f"the body is over the limit of {bytes_max} bytes",
        status=413,
        kind="invalid_request_error",
        code=code,
        limit="body_bytes",
    )


def read_again(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read, and then what the connection gives."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return receive_again


async def send_json(
    send: Send, body: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Send one JSON answer in one piece."""
    data = orjson.dumps(body)
    await send(json_start(len(data), status=status, headers=headers))
    await send({"type": "http.response.body", "body": data})


def json_start(
    size_bytes: int, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The message that opens a JSON answer of this size."""
    named = {
        "content-type": "application/json",
        "content-length": str(size_bytes),
        **(headers or {}),
    }
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(n.encode(), v.encode("latin-1")) for n, v in named.items()],
    }


def refusal_body(error: RefusedError, *, messages: str = "messages") -> dict[str, Any]:
    """The refusal in OpenAI's shape, which the admin API has too.

    `messages` is what the protocol calls the field with what the model is to continue.
    """
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": messages if error.param == "messages" else error.param,
            "code": error.code,
        }
    }


async def send_refusal(
    send: Send, error: RefusedError, *, shape: Callable[[RefusedError], object] = refusal_body
) -> None:
    """Send the refusal with its status and when to come back, in a protocol's shape."""
    retry = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    await send_json(send, shape(error), status=error.status, headers=retry)


class Answering:
    """The answer to one request, and whether any of it is sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of it."""
        self._has_begun = True
        await self._send(message)

    async def refuse(self, error: RefusedError, *, shape: Callable[[RefusedError], object]) -> None:
        """Send a refusal in its place, unless some of it is sent."""
        if not self._has_begun:
            await send_refusal(self.send, error, shape=shape)
