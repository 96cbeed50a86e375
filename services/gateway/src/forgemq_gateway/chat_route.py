"""POST /v1/chat/completions: the hot path, in plain ASGI.

A turn is sampled fully and committed to the log before its first byte is written. Until it is
dispatched every refusal is a plain HTTP error; a stream that has to wait opens with 200 and signs
of life, and what fails after that is an error event.
"""

import asyncio
from typing import Any

import orjson
from msgspec import Struct

from forgemq_contracts.completions import DeliveredCompletion
from forgemq_gateway.access import Access
from forgemq_gateway.composer import Composer
from forgemq_gateway.core.chat import ChatRequest, read_chat_request
from forgemq_gateway.core.episodes import Episode
from forgemq_gateway.core.errors import UNFORESEEN, RefusedError, busy, failed
from forgemq_gateway.core.history import Completion
from forgemq_gateway.core.replies import Answer, chat_chunks, chat_completion, waiting_chunk
from forgemq_gateway.operations import Operations
from forgemq_gateway.surroundings import Surroundings
from forgemq_gateway.turn_source import Awaited, TurnSource
from forgemq_gateway.wire import (
    ClientGoneError,
    Receive,
    Scope,
    Send,
    headers_of,
    read_body,
    refusal_body,
    send_json,
    send_refusal,
)
from forgemq_telemetry.traces import headers_from_http

# A longer answer is written in two steps: the second waits until the first is on its way, so that
# a client that went away meanwhile does not count as served.
_ONE_WRITE_BYTES_MAX = 65_536


class Client(Struct, kw_only=True, eq=False):
    """One connection that waits for an answer."""

    request: ChatRequest
    send: Send
    leaving: "asyncio.Task[None]"
    has_opened: bool = False


class ChatRoute:
    """Answers chat requests of open episodes."""

    def __init__(
        self,
        source: TurnSource,
        *,
        access: Access,
        composer: Composer,
        operations: Operations,
        around: Surroundings,
    ) -> None:
        self._source = source
        self._access = access
        self._composer = composer
        self._operations = operations
        self._settings = around.settings
        self._outbox = around.outbox
        self._tasks = around.tasks
        self._clock = around.clock
        self._changed = around.changed
        self._telemetry = around.telemetry

    async def serve(self, scope: Scope, receive: Receive, send: Send, *, key: str | None) -> None:
        """Answer one request of the episode with this key."""
        started_s = self._clock.now_s()
        headers = headers_of(scope)
        try:
            episode = self._access.episode(key)
            body = await read_body(
                receive, bytes_max=self._settings.body_bytes_max, headers=headers
            )
            request = read_chat_request(body)
            self._check_memory()
            awaited = self._source.start(episode, request, caller=headers_from_http(headers))
        except ClientGoneError:
            return
        except RefusedError as error:
            self._telemetry.count("gateway.refused", status=error.status)
            await send_refusal(send, error)
            return
        except UNFORESEEN as error:
            self._telemetry.event("request_failed", error=f"{type(error).__name__}: {error}")
            await send_refusal(send, failed("the request could not be read", status=500))
            return
        del body
        episode.renew(self._clock.now_s())
        client = Client(
            request=request, send=send, leaving=self._tasks.create_task(_client_left(receive))
        )
        episode.clients += 1
        try:
            await self._answer(client, episode, awaited)
        finally:
            client.leaving.cancel()
            episode.clients -= 1
            await self._source.leave(episode, awaited)
            episode.renew(self._clock.now_s())
            self._changed.beat()
        self._telemetry.observe("gateway.answer_s", self._clock.now_s() - started_s)

    def _check_memory(self) -> None:
        if self._operations.held_bytes > self._settings.memory_bytes_max:
            raise busy(
                "the histories of open groups fill the gateway's memory",
                status=503,
                retry_after_s=5,
            )

    async def _answer(self, client: Client, episode: Episode, awaited: Awaited) -> None:
        try:
            completion = await self._wait(client, awaited)
        except ClientGoneError:
            return
        except RefusedError as error:
            await self._refuse(client, error)
            return
        answer = self._composer.answer(
            completion, model=client.request.model, with_logprobs=client.request.wants_logprobs
        )
        if client.request.is_stream:
            await _write_stream(client, answer)
        else:
            await _write_whole(client, answer)
        if not client.leaving.done():
            self._delivered(episode, completion)

    async def _wait(self, client: Client, awaited: Awaited) -> Completion:
        """The completion, with signs of life to a stream in the meantime.

        Raises:
            ClientGoneError: the connection closed first.
            RefusedError: the turn failed.
        """
        while True:
            await asyncio.wait(
                (awaited.result, client.leaving),
                timeout=self._settings.keepalive_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if awaited.result.done():
                return awaited.result.result()
            if client.leaving.done():
                raise ClientGoneError
            if client.request.is_stream and awaited.is_dispatched:
                await self._sign_of_life(client, awaited.request_id)

    async def _sign_of_life(self, client: Client, request_id: str) -> None:
        """A comment for proxies and an event without content for clients that count events."""
        await _open_stream(client)
        chunk = waiting_chunk(
            request_id=request_id,
            created_s=self._clock.wall_ms() // 1000,
            model=client.request.model,
        )
        data = b": waiting\n\n" + _event(chunk)
        await client.send({"type": "http.response.body", "body": data, "more_body": True})

    async def _refuse(self, client: Client, error: RefusedError) -> None:
        self._telemetry.count("gateway.refused", status=error.status)
        if client.has_opened:
            await client.send({"type": "http.response.body", "body": _event(refusal_body(error))})
        else:
            await send_refusal(client.send, error)

    def _delivered(self, episode: Episode, completion: Completion) -> None:
        if completion.request_id in episode.delivered:
            return
        episode.delivered.add(completion.request_id)
        record = DeliveredCompletion(
            request_id=completion.request_id,
            episode_id=episode.episode_id,
            group_id=episode.opened.group_id,
            delivered_ms=self._clock.wall_ms(),
        )
        self._tasks.create_task(self._outbox.completion_delivered(record))


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _open_stream(client: Client) -> None:
    if client.has_opened:
        return
    client.has_opened = True
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await client.send({"type": "http.response.start", "status": 200, "headers": headers})


async def _write_stream(client: Client, answer: Answer) -> None:
    chunks = chat_chunks(answer, includes_usage=client.request.includes_usage)
    data = b"".join(_event(chunk) for chunk in chunks) + b"data: [DONE]\n\n"
    await _open_stream(client)
    await _write_last(client.send, data)


async def _write_whole(client: Client, answer: Answer) -> None:
    await send_json(
        client.send, chat_completion(answer), headers={"x-request-id": answer.request_id}
    )


async def _write_last(send: Send, data: bytes) -> None:
    if len(data) > _ONE_WRITE_BYTES_MAX:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        data = b""
    await send({"type": "http.response.body", "body": data})


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
