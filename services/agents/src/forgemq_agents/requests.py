"""One JSON request with bounded retries: every call to the gateway goes through it.

A retry sends the same bytes again. The gateway derives its ids from them, so a completion or a
group that it had already taken is answered again and not made twice.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Literal

import aiohttp
import msgspec
from msgspec import Meta, Struct

from forgemq_agents.errors import (
    ContextFullError,
    EpisodeOverError,
    GatewayError,
    KeysFullError,
)
from forgemq_agents.user_values import in_json
from forgemq_contracts.admin import Refusal
from forgemq_contracts.asked_keys import KEYS_FULL_CODE
from forgemq_telemetry.traces import Headers, headers_to_http

Method = Literal["GET", "POST"]


class Retry(Struct, frozen=True, kw_only=True):
    """How long to retry while the gateway is away or busy."""

    deadline_s: Annotated[
        float, Meta(gt=0, description="After an outage this long there is no new attempt.")
    ] = 300.0
    # Doubles up to `wait_max_s`: a gateway that restarts is back within seconds, and one that is
    # away for longer must not meet all agents at once.
    first_wait_s: Annotated[float, Meta(gt=0)] = 0.2
    wait_max_s: Annotated[float, Meta(gt=0)] = 5.0
    # The default deadline of a completion, and 30 s for the answer's way.
    read_timeout_s: Annotated[
        float, Meta(gt=0, description="A silence this long ends an attempt.")
    ] = 930.0


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

# A host that is up accepts within milliseconds; one that is gone may never refuse.
CONNECT_TIMEOUT_S = 5.0
# Enough of a foreign error page to tell who answered.
REASON_BYTES_MAX = 200
NO_HEADERS: Mapping[str, str] = {}


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
        self._answered_s = -math.inf

    async def send(
        self,
        method: Method,
        url: str,
        *,
        key: str,
        fields: object = None,
        wait_s: float = 0,
        headers: Mapping[str, str] = NO_HEADERS,
        trace: Headers = (),
        is_turn: bool = False,
    ) -> JsonReply:
        """Send until the answer is neither 429 nor 5xx.

        The deadline counts from the first failure of an outage and not from the first attempt: a
        completion that takes ten minutes is asked for again if its gateway dies.

        Args:
            method: GET or POST.
            url: Full address.
            key: Sent as the bearer token.
            fields: Body as JSON; without it the body is empty.
            wait_s: Time the gateway was asked to hold the request, added to the read timeout.
            headers: Further ones, of ASCII.
            trace: Trace context to send along.
            is_turn: It asks for a completion. A 429 is then no outage while others get theirs: its
                deadline counts from the newest one.

        Raises:
            EpisodeOverError: 404, 409 or 410.
            ContextFullError: 400 with the code context_length_exceeded.
            GatewayError: any other refusal, or no answer before the deadline.
        """
        body = b"" if fields is None else in_json(fields)
        sent = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        sent |= {**headers, **headers_to_http(trace)}
        failing_since_s: float | None = None
        pause_s = self._retry.first_wait_s
        while True:
            began_s = self._clock_s()
            ended = await self._attempt(method, url, headers=sent, body=body, wait_s=wait_s)
            now_s = self._clock_s()
            if isinstance(ended, JsonReply):
                if is_turn:
                    self._answered_s = now_s
                return ended
            # A connection that is cut after a long wait shows that the gateway was up until then:
            # a new outage begins.
            if failing_since_s is None or (ended.is_cut and now_s - began_s > CONNECT_TIMEOUT_S):
                failing_since_s, pause_s = now_s, self._retry.first_wait_s
            if is_turn and ended.error.status == 429:
                failing_since_s = max(failing_since_s, self._answered_s)
            wait = pause_s if ended.wait_s is None else ended.wait_s
            deadline_s = failing_since_s + self._retry.deadline_s
            if not _is_temporary(ended.error.status) or now_s + wait > deadline_s:
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


def _is_temporary(status: int) -> bool:
    return status in (0, 429) or status >= 500


def _refusal(status: int, content: bytes, *, url: str) -> GatewayError:
    try:
        error = msgspec.json.decode(content, type=Refusal).error
        reason, code = error.message, error.code or ""
    except msgspec.MsgspecError:
        # A proxy between us and the gateway answers in its own words.
        reason, code = content[:REASON_BYTES_MAX].decode(errors="replace"), ""
    message = f"{status} from {url}: {reason}"
    if status in (404, 409, 410):
        return EpisodeOverError(message, status=status, code=code)
    if status == 400 and code == "context_length_exceeded":
        return ContextFullError(message, status=status, code=code)
    if status == 400 and code == KEYS_FULL_CODE:
        return KeysFullError(message, status=status, code=code)
    return GatewayError(message, status=status, code=code)


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header; None if it is absent, a date or malformed."""
    try:
        return None if retry_after is None else max(0.0, float(retry_after))
    except ValueError:
        return None
