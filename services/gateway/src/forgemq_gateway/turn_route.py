"""One request for a completion, in plain ASGI: wait, keep the connection alive, write the answer.

A turn is sampled fully and committed to the log before its first byte is written, unless the
episode's streams are live (live_answers.py), and its delivery before its last byte (deliveries.py).
Before it is dispatched every refusal is a plain HTTP error. A stream that has to wait after that
opens with 200 and keep-alives, and later failures are error events. What those look like is the
protocol's.
"""

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import orjson

from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_contracts.half_pairs import without_halves
from forgemq_gateway.access import Access
from forgemq_gateway.body_memory import BodyMemory, CountedBody
from forgemq_gateway.client import Client
from forgemq_gateway.composer import Composer
from forgemq_gateway.connections import LEFT
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.choices import check_choices
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import (
    MovedError,
    RefusedError,
    failed,
    log_refuses,
)
from forgemq_gateway.core.history import History
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.path_limits import check_path_length
from forgemq_gateway.core.requests import ReadItems, Request
from forgemq_gateway.deliveries import Deliveries
from forgemq_gateway.dispatcher import Result
from forgemq_gateway.first_done import first_done
from forgemq_gateway.holding import held_s
from forgemq_gateway.large_work import LargeWork
from forgemq_gateway.live_answers import LiveAnswer, LiveAnswers, check_continues
from forgemq_gateway.turn_source import Awaited, TurnSource
from forgemq_gateway.waiting_clients import WaitingClients
from forgemq_gateway.wire import (
    ClientGoneError,
    Receive,
    Scope,
    Send,
    headers_of,
    send_json,
    send_refusal,
)
from forgemq_gateway.wire_protocol import TokenCounter, WireProtocol

# What an answer has for each token with its log-probability: 5 microseconds of work.
_LOGPROB_BYTES = 128


class TurnRoute:
    """Answers requests for completions of open episodes."""

    def __init__(
        self,
        source: TurnSource,
        *,
        access: Access,
        composer: Composer,
        memory: BodyMemory,
        context: GatewayContext,
    ) -> None:
        self._source = source
        self._access = access
        self._composer = composer
        self._work = LargeWork("read")
        self._settings = context.settings
        self._live = LiveAnswers(source.live, composer=composer, clock=context.clock)
        self._deliveries = Deliveries(context.outbox, clock=context.clock)
        self._memory = memory
        self.clients = WaitingClients()
        self._clock = context.clock
        self._changed = context.changed
        self._telemetry = context.telemetry

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        episode: HeldEpisode,
        *,
        protocol: WireProtocol,
    ) -> None:
        """Answer one request of the episode that its key opens."""
        started_s = self._clock.now_s()
        async with self._counted(send, shape=protocol.error) as counted:
            headers = headers_of(scope)
            request = await self._request(protocol, receive, episode, counted, headers=headers)
            awaited = self._start(request, episode=episode, scope=scope)
            client = Client(
                protocol=protocol,
                request=request,
                send=send,
                leaving=scope[LEFT],
                stream=protocol.stream(request),
            )
            try:
                await self._attend(client, episode, awaited)
            except MovedError as error:
                error.has_opened, error.refuse = client.has_opened, client.refuse
                raise
            self._telemetry.observe("gateway.answer_s", self._clock.now_s() - started_s)

    async def count(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        episode: HeldEpisode,
        *,
        counter: TokenCounter,
    ) -> None:
        """Answer with the context tokens that a request would have now; nothing is sampled."""
        async with self._counted(send, shape=counter.error) as counted:
            headers = headers_of(scope)
            request = await self._request(counter, receive, episode, counted, headers=headers)
            self._access.check_open(episode)
            episode.renew(self._clock.now_s())
            tokens = await self._tokens(request, episode)
            await send_json(send, counter.counted(tokens))

    @asynccontextmanager
    async def _counted(
        self, send: Send, *, shape: Callable[[RefusedError], object]
    ) -> AsyncIterator[CountedBody]:
        """A body that counts until its request is answered, if only by a refusal from within.

        Raises:
            MovedError: its group moved, with the body if it was read.
        """
        with self._memory.body() as counted:
            try:
                yield counted
            except ClientGoneError:
                return
            except MovedError as error:
                error.body = counted.body or None
                raise
            except RefusedError as error:
                self._telemetry.count("gateway.refused", status=error.status, limit=error.limit)
                await send_refusal(send, error, shape=shape)

    async def _tokens(self, request: Request, episode: HeldEpisode) -> int:
        """Context tokens of this request.

        Raises:
            RefusedError: 400 as the composer says; 500 for any other error.
        """
        with self._failing_alone():
            return await self._composer.count_tokens(request, episode=episode)

    async def _request(
        self,
        protocol: WireProtocol | TokenCounter,
        receive: Receive,
        episode: HeldEpisode,
        counted: CountedBody,
        *,
        headers: Mapping[str, str],
    ) -> Request:
        """The request in the body of an open episode's client.

        Raises:
            ClientGoneError: the connection closed first.
            RefusedError: 4xx as the key, the limits and the protocol say; 500 for any other error.
        """
        self._access.check_open(episode)  # It may have ended while the request had no place.
        body = await counted.read(receive, headers=headers)
        request = await self._read(protocol, body, episode.history)
        check_choices(request, choices_max=self._settings.choices_max)
        check_path_length(request, messages_max=self._settings.path_messages_max)
        if request.items is not None:
            episode.history.bodies.note(body, request.items)
        return request

    async def _read(
        self, protocol: WireProtocol | TokenCounter, body: bytes, history: History
    ) -> Request:
        """The request in a body; what an earlier one has not, if it begins as that one.

        Raises:
            RefusedError: 4xx as the protocol says; 500 for any other error.
        """
        begin = history.bodies.begin_of(body, protocol=protocol.name)
        if begin is None:
            return await self._parsed(protocol, body, history, None)
        try:
            return await self._parsed(protocol, begin.without_known(body), history, begin.items)
        except RefusedError:
            # The whole body says what is wrong, and where.
            return await self._parsed(protocol, body, history, None)

    async def _parsed(
        self,
        protocol: WireProtocol | TokenCounter,
        body: bytes,
        history: History,
        known: ReadItems | None,
    ) -> Request:
        """The request in a body, which is read beside the event loop if it is large.

        Raises:
            RefusedError: as `_read`.
        """
        with self._failing_alone():
            return await self._work.run(
                lambda: _read_whole(protocol, body, history, known), size=len(body)
            )

    def _start(
        self, request: Request, *, episode: HeldEpisode, scope: Scope
    ) -> tuple[Awaited, ...]:
        """Let a client wait for the turns of its request, one for each choice.

        Raises:
            RefusedError: 4xx as the parts say; 500 for any other error.
        """
        with self._failing_alone():
            self._memory.check()
            self.clients.check()
            self._access.check_open(episode)  # Again: it may have ended while the body came.
            self._access.check_reply(episode, is_given=request.reply is not None)
            return self._source.start(
                episode, request, headers=headers_of(scope), held_s=held_s(scope)
            )

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Within it a defect of what runs on a client's words fails this request and no other.

        Raises:
            RefusedError: as the block does; 500 for any other error, which is logged whole.
        """
        try:
            yield
        except RefusedError:
            raise
        except Exception as error:
            # Parsers, templates, comparisons and hashes may raise anything for what is unexpected.
            self._telemetry.event(
                "request_failed",
                error=f"{type(error).__name__}: {error}",
                traceback=traceback.format_exc(),
            )
            raise failed("the request could not be read", status=500) from error

    async def _attend(
        self, client: Client, episode: HeldEpisode, awaited: Sequence[Awaited]
    ) -> None:
        """Answer a client; its episode's lease cannot lapse meanwhile."""
        episode.renew(self._clock.now_s())
        episode.clients += 1
        self.clients.add(client.leaving)
        try:
            await self._answer(client, episode, awaited)
        finally:
            self.clients.discard(client.leaving)
            episode.clients -= 1
            episode.renew(self._clock.now_s())
            if not episode.clients:
                self._changed.notify(episode.opened.group_id)
            # Last: it writes to the log, which may take long or fail, and nobody waits for that.
            await self._source.leave(episode, awaited)

    async def _answer(
        self, client: Client, episode: HeldEpisode, awaited: Sequence[Awaited]
    ) -> None:
        try:
            with self._live.following(client, episode, awaited) as live:
                completions = await self._wait(client, awaited, live)
            check_continues(client, completions)
        except ClientGoneError:
            return
        except RefusedError as error:
            # Another gateway would write the answer from its start.
            if isinstance(error, MovedError) and not client.written.parts:
                raise
            self._telemetry.count("gateway.refused", status=error.status, limit=error.limit)
            await client.refuse(error)
            return
        data = await self._written(client, completions)
        has_left = client.leaving.done
        record = partial(self._deliveries.record, episode, completions, has_left=has_left)
        try:
            await client.write(data, record, request_id=completions[0].request_id)
        except FINAL_ERRORS:
            raise
        except LogError as error:
            if client.has_end_begun:
                raise  # No event can follow: its connection is closed.
            await client.refuse(log_refuses(error))

    async def _written(self, client: Client, completions: Sequence[KnownCompletion]) -> bytes:
        """The answer in the client's protocol; one with many log-probabilities beside the loop."""
        request = client.request

        def write() -> bytes:
            answers = self._composer.answers(completions, request=request)
            if request.is_stream:
                return client.stream.finish(answers)
            return orjson.dumps(client.protocol.whole(answers))

        size = 0
        if request.wants_logprobs:
            each = _LOGPROB_BYTES * (1 + request.top_tokens)
            size = each * sum(completion.output_tokens for completion in completions)
        return await self._work.run(write, size=size)

    async def _wait(
        self, client: Client, awaited: Sequence[Awaited], live: LiveAnswer | None
    ) -> tuple[KnownCompletion, ...]:
        """Wait for the completion of each choice; a stream that gets nothing gets keep-alives.

        If it is `live`, it gets the beginning of its answer too.

        Raises:
            ClientGoneError: the connection closed first.
            RefusedError: a turn failed; those of the other choices go on if the client comes back.
        """
        results = [each.result for each in awaited]
        now_s = asyncio.get_running_loop().time
        due_s = now_s() + self._settings.keepalive_s
        while True:
            pending = [result for result in results if not result.done()]
            if len(pending) < len(results):
                _raise_failed(results)
            if not pending:
                return tuple(result.result() for result in results)
            news = [] if live is None else [live.news]
            waiting: list[asyncio.Future[Any]] = [*pending, *news, client.leaving]
            await first_done(waiting, timeout_s=due_s - now_s())
            if all(result.done() for result in results):
                continue
            if client.leaving.done():
                raise ClientGoneError
            if live is not None and news[0].done() and await live.write_news():
                due_s = now_s() + self._settings.keepalive_s
            elif now_s() >= due_s:
                await self._keep_alive(client, awaited)
                due_s = now_s() + self._settings.keepalive_s

    async def _keep_alive(self, client: Client, awaited: Sequence[Awaited]) -> None:
        """Tell the client of a stream that its answer is being made, once lanes have its turns."""
        if client.request.is_stream and all(each.is_dispatched for each in awaited):
            await client.keep_alive(
                request_id=awaited[0].request_id, created_s=self._clock.wall_ms() // 1000
            )


def _read_whole(
    protocol: WireProtocol | TokenCounter, body: bytes, history: History, known: ReadItems | None
) -> Request:
    """The request in a body; of one that is refused, without its halves of surrogate pairs.

    Raises:
        RefusedError: as the protocol says.
    """
    try:
        return protocol.read(body, history, known)
    except RefusedError:
        whole = without_halves(body)
        if whole == body:
            raise
        return protocol.read(whole, history, known)


def _raise_failed(results: Sequence[Result]) -> None:
    """Raise the error of the first turn that has failed, if one has."""
    for result in results:
        if result.done() and (error := result.exception()) is not None:
            raise error
