"""One JSON request with bounded retries: what every call to the gateway goes through.

A retry sends the same bytes again. The gateway derives its ids from them, so a completion or a
group that it had already taken is answered and not done twice. A claim whose answer was lost holds
its episode until the lease lapses.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Literal

import aiohttp
import msgspec
from msgspec import Meta, Struct

from forgemq_agents.errors import ContextFullError, EpisodeOverError, GatewayError
from forgemq_telemetry.traces import Headers, headers_to_http

Method = Literal["GET", "POST"]


class Retry(Struct, frozen=True, kw_only=True):
    """How long to insist when the gateway is away or busy."""

    deadline_s: Annotated[
        float, Meta(gt=0, description="No new attempt after this much of one outage.")
    ] = 300.0
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


class JsonReply(Struct, frozen=True, kw_only=True):
    """A 2xx answer."""

    status: int
    body: bytes


class _Failure(Struct, frozen=True, kw_only=True):
    """An attempt without a 2xx answer."""

    error: GatewayError
    wait_s: float | None = None
    is_cut: bool = False


Sleep = Callable[[float], Awaitable[None]]

CONNECT_TIMEOUT_S = 5.0


class JsonRequests:
    """Sends JSON over one connection pool."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        retry: Retry,
        sleep: Sleep = asyncio.sleep,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = http
        self._retry = retry
        self._sleep = sleep
        self._clock_s = clock_s

    async def send(
        self,
        method: Method,
        url: str,
        *,
        key: str,
        fields: object = None,
        wait_s: float = 0,
        trace: Headers = (),
    ) -> JsonReply:
        """Send until it is answered with other than 429 or 5xx.

        The deadline counts from the first failure of an outage and not from the start: a turn
        that generates for ten minutes is asked for again when its gateway dies.

        Args:
            method: GET or POST.
            url: Full address.
            key: Sent as the bearer token.
            fields: Body as JSON; None for none.
            wait_s: Time the gateway was asked to hold the request, added to the read timeout.
            trace: Context of the work that asks.

        Raises:
            EpisodeOverError: 404, 409 or 410.
            ContextFullError: 400 with the code context_length_exceeded.
            GatewayError: any other refusal, or no answer before the deadline.
        """
        body = b"" if fields is None else msgspec.json.encode(fields)
        headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            **headers_to_http(trace),
        }
        failing_since_s: float | None = None
        pause_s = self._retry.first_wait_s
        while True:
            began_s = self._clock_s()
            ended = await self._attempt(method, url, headers=headers, body=body, wait_s=wait_s)
            if isinstance(ended, JsonReply):
                return ended
            now_s = self._clock_s()
            # It held the request for long and then was gone: until now the gateway was there.
            if failing_since_s is None or (ended.is_cut and now_s - began_s > CONNECT_TIMEOUT_S):
                failing_since_s, pause_s = now_s, self._retry.first_wait_s
            wait = pause_s if ended.wait_s is None else ended.wait_s
            deadline_s = failing_since_s + self._retry.deadline_s
            if not _may_pass(ended.error.status) or now_s + wait > deadline_s:
                raise ended.error
            await self._sleep(wait)
            pause_s = min(2 * pause_s, self._retry.wait_max_s)

    async def _attempt(
        self, method: Method, url: str, *, headers: Mapping[str, str], body: bytes, wait_s: float
    ) -> JsonReply | _Failure:
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=CONNECT_TIMEOUT_S,
            sock_read=self._retry.read_timeout_s + wait_s,
        )
        try:
            async with self._http.request(
                method, url, data=body or None, headers=headers, timeout=timeout
            ) as response:
                content = await response.read()
                if response.status < 300:
                    return JsonReply(status=response.status, body=content)
                return _Failure(
                    error=_refusal(response.status, content, url=url),
                    wait_s=_seconds(response.headers.get("Retry-After")),
                )
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return _Failure(
                error=GatewayError(f"{url}: {type(error).__name__}: {error}"),
                is_cut=not isinstance(error, aiohttp.ClientConnectorError | TimeoutError),
            )


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
