"""One JSON request with bounded retries: what every call to the gateway goes through.

A retry sends the same bytes again. The gateway derives its ids from them, so a request that it
had already taken is answered and not done twice.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import aiohttp
import msgspec
from msgspec import Meta, Struct

from forgemq.agents.errors import ContextFullError, EpisodeOverError, GatewayError

Method = Literal["GET", "POST"]


class Retry(Struct, frozen=True, kw_only=True):
    """How long to insist when the gateway is away or busy."""

    deadline_s: Annotated[float, Meta(gt=0, description="No new attempt after this.")] = 300.0
    first_wait_s: Annotated[float, Meta(gt=0)] = 0.2
    wait_max_s: Annotated[float, Meta(gt=0)] = 5.0
    read_timeout_s: Annotated[float, Meta(gt=0, description="Silence that means it is gone.")] = (
        930.0
    )


class ErrorBody(Struct, frozen=True):
    """The `error` object of a refusal."""

    message: str = ""
    code: str | None = None


class Refusal(Struct, frozen=True):
    """Body of every 4xx and 5xx."""

    error: ErrorBody


class Reply(Struct, frozen=True, kw_only=True):
    """A 2xx answer."""

    status: int
    body: bytes


Sleep = Callable[[float], Awaitable[None]]


class JsonRequests:
    """Sends JSON over one connection pool."""

    def __init__(
        self, http: aiohttp.ClientSession, *, retry: Retry, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._http = http
        self._retry = retry
        self._sleep = sleep

    async def send(
        self, method: Method, url: str, *, key: str, fields: object = None, wait_s: float = 0
    ) -> Reply:
        """Send until it is answered with other than 429 or 5xx.

        Args:
            method: GET or POST.
            url: Full address.
            key: Sent as the bearer token.
            fields: Body as JSON; None for none.
            wait_s: Time the gateway was asked to hold the request, added to the read timeout.

        Raises:
            EpisodeOverError: 404, 409 or 410.
            ContextFullError: 400 with the code context_length_exceeded.
            GatewayError: any other refusal, or no answer before the deadline.
        """
        body = b"" if fields is None else msgspec.json.encode(fields)
        clock = asyncio.get_running_loop()
        deadline = clock.time() + self._retry.deadline_s
        pause_s = self._retry.first_wait_s
        while True:
            refused, asked_s = await self._attempt(method, url, key=key, body=body, wait_s=wait_s)
            if isinstance(refused, Reply):
                return refused
            wait = pause_s if asked_s is None else asked_s
            if not _may_pass(refused.status) or clock.time() + wait > deadline:
                raise refused
            await self._sleep(wait)
            pause_s = min(2 * pause_s, self._retry.wait_max_s)

    async def _attempt(
        self, method: Method, url: str, *, key: str, body: bytes, wait_s: float
    ) -> tuple[Reply | GatewayError, float | None]:
        """The answer, or what refused it and the seconds to wait that it names."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=5.0, sock_read=self._retry.read_timeout_s + wait_s
        )
        try:
            async with self._http.request(
                method, url, data=body or None, headers=headers, timeout=timeout
            ) as response:
                content = await response.read()
                if response.status < 300:
                    return Reply(status=response.status, body=content), None
                return (
                    _refusal(response.status, content, url=url),
                    _seconds(response.headers.get("Retry-After")),
                )
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return GatewayError(f"{url}: {type(error).__name__}: {error}"), None


def _may_pass(status: int) -> bool:
    return status in (0, 429) or status >= 500


def _refusal(status: int, content: bytes, *, url: str) -> GatewayError:
    try:
        error = msgspec.json.decode(content, type=Refusal).error
    except msgspec.MsgspecError:
        error = ErrorBody(message=content[:200].decode(errors="replace"))
    code = error.code or ""
    message = f"{status} from {url}: {error.message}"
    if status in (404, 409, 410):
        return EpisodeOverError(message, status=status, code=code)
    if status == 400 and code == "context_length_exceeded":
        return ContextFullError(message, status=status, code=code)
    return GatewayError(message, status=status, code=code)


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header; dates and nonsense count as none."""
    try:
        return None if retry_after is None else max(0.0, float(retry_after))
    except ValueError:
        return None
