"""Runs the requests of one lane in the engine; each is answered by exactly one record."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from msgspec import Struct

from forgemq_bus.log import Headers, Writer
from forgemq_contracts import topics
from forgemq_contracts.accounting import end_of, is_candidate
from forgemq_contracts.completions import (
    CancelledCompletion,
    FinishedCompletion,
    RequestedCompletion,
)
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.repetition import RepetitionStop
from forgemq_inference.batch_clock import BatchClock
from forgemq_inference.core.acceptance import AcceptanceMeter
from forgemq_inference.core.attention_groups import AttentionGroups
from forgemq_inference.core.engine_answer import (
    EngineAnswer,
    InvalidAnswerError,
    check_weights,
)
from forgemq_inference.core.engine_limits import EngineLimits
from forgemq_inference.core.engine_load import alone_s
from forgemq_inference.core.generation import (
    Timing,
    cached_by_tier,
    finished_completion,
    generate_body,
    refused_completion,
    timing_of,
)
from forgemq_inference.core.lane import (
    CANCELLED,
    DEADLINE,
    Attempt,
    LaneState,
    Refused,
    Run,
    Skipped,
)
from forgemq_inference.core.reading import WeightsChangedError, read_completion, reading_body
from forgemq_inference.core.repetition import NO_REPETITION_STOP
from forgemq_inference.core.weights import Weights, WeightsState
from forgemq_inference.engine import EngineError, EngineUnreachableError
from forgemq_inference.engine_pair import LaneEngine
from forgemq_inference.live_chunks import LiveChunks, Spawn
from forgemq_inference.pause_clock import PauseClock
from forgemq_inference.teacher import Teacher
from forgemq_shell.clock import now_ms
from forgemq_shell.patience import patiently
from forgemq_shell.records import emit_of
from forgemq_telemetry import Telemetry

NOT_SERVING = Refused("error", "engine", "engine: not serving")
LEAVING = Refused("error", "engine", "engine: the lane is leaving")

_ABORTED_WITHIN_S = 2.0
"""The engine ends an aborted request at its next decoding step, well under a second."""
_READINGS_MAX = 20
"""Of one given output. A reading takes milliseconds, the time between two updates seconds."""
_BETWEEN_READINGS_S = 0.2
_TIMEOUT_MIN_S = 0.001
"""A request past its deadline still gets an HTTP call, which fails at once as unreachable."""


class LaneLimits(Struct, frozen=True, kw_only=True):
    """The lane's epoch, its bound on concurrent requests, and where their records go.

    Attributes:
        cache_salt: Of the run: in a pool of several runs, K/V of two that have the same name for
            other weights is not found by one another.
        repetition_stop: Of the run.
    """

    epoch: int
    concurrent_max: int
    group_partitions: int
    cache_salt: str
    repetition_stop: RepetitionStop = NO_REPETITION_STOP


class Requests:
    """Takes requests and cancellations of one lane; every taken request ends as one record.

    `open` when the engine serves, `close` when it is lost or the lane leaves: what waits or runs
    then ends with an error at once, so that the gateway redispatches it.
    """

    def __init__(
        self,
        engine: LaneEngine,
        state: LaneState,
        *,
        weights: WeightsState,
        limits: LaneLimits,
        writer: Writer,
        spawn: Spawn,
        pauses: PauseClock,
        on_unreachable: Callable[[], None],
        telemetry: Telemetry,
        teacher: Teacher | None = None,
    ) -> None:
        """Begin closed: requests are refused until `open`.

        Args:
            engine: Generates.
            state: Decides which requests run.
            weights: Of the engine.
            limits: Of the lane.
            writer: For finished-completions.
            spawn: Starts a coroutine whose failure ends the service.
            pauses: Counts the time that generation stands still.
            on_unreachable: Called when the engine did not answer a request.
            telemetry: Of the service.
            teacher: Is asked about every output that may train; None without one.
        """
        self._teacher = teacher
        self._engine = engine
        self._state = state
        self._weights = weights
        self._limits = limits
        self._writer = writer
        self._spawn = spawn
        self._pauses = pauses
        self._on_unreachable = on_unreachable
        self._telemetry = telemetry
        self._acceptance = AcceptanceMeter()
        self._slots = asyncio.Semaphore(limits.concurrent_max)
        self._engine_limits: EngineLimits | None = None
        self._groups = AttentionGroups(1)
        self._closed = _future()
        self._closed.set_result(NOT_SERVING)
        self._cancels: dict[Attempt, asyncio.Future[Refused]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.batch = BatchClock()
        self.queued = 0
        self.running = 0
        self._unanswered = 0
        self.output_tokens_total = 0

    @property
    def remembered_bytes(self) -> int:
        """Token ids kept of finished completions."""
        return self._state.remembered.size_bytes

    async def wait_idle(self) -> None:
        """Return once every request that was taken has its record."""
        await self._idle.wait()

    def open(self, engine_limits: EngineLimits) -> None:
        """Send requests to the engine from here on."""
        self._engine_limits = engine_limits
        self._groups = AttentionGroups(engine_limits.attention_groups)
        self._closed = _future()

    def close(self, reason: Refused) -> None:
        """End everything that waits or runs, and refuse later requests for `reason`."""
        if self._closed.done():
            self._closed = _future()
        self._closed.set_result(reason)

    def take(self, request: RequestedCompletion, headers: Headers) -> None:
        """Answer a request as soon as a slot is free, unless another process answers it."""
        decision = self._state.take(request, now_ms=now_ms())
        match decision:
            case Skipped(reason):
                self._telemetry.count("inference.skipped", reason=reason)
            case Refused():
                self._spawn(self._write_finished(refused_completion(request, decision), headers))
            case Run():
                # Counted here and not in the task: the inbox must see a burst before it reads on.
                self.queued += 1
                self._unanswered += 1
                self._idle.clear()
                answer = self._answer_request(request, decision, headers, taken_s=time.monotonic())
                self._spawn(answer)

    def cancel(self, cancelled: CancelledCompletion) -> None:
        """End the open attempts of a request whose client went away."""
        for attempt in self._state.cancel(cancelled):
            cancel = self._cancels.get(attempt)
            if cancel is not None and not cancel.done():
                cancel.set_result(CANCELLED)

    async def _answer_request(
        self, request: RequestedCompletion, run: Run, headers: Headers, *, taken_s: float
    ) -> None:
        try:
            await self._answer(request, run, headers, taken_s=taken_s)
        finally:
            self._unanswered -= 1
            if not self._unanswered:
                self._idle.set()

    async def _answer(
        self, request: RequestedCompletion, run: Run, headers: Headers, *, taken_s: float
    ) -> None:
        lane = request.lane
        with self._telemetry.span(
            "inference.generate", parent=headers, request_id=request.request_id, lane=lane
        ) as span:
            async with self._slot():
                record = await self._under_one_version(request, run, taken_s=taken_s)
            if self._teacher is not None:  # Its place is free meanwhile.
                closed = self._closed
                taught = await self._teacher.taught_before(closed, record, run.context)
                record = taught or refused_completion(request, closed.result())
            self._state.end(run.attempt)
            if is_candidate(record):
                # Before the write: a request that names this one may come as soon as it is written.
                whole = run.context.extended(record.output)
                self._state.remembered.remember(request.request_id, whole)
            span.set(finish_reason=record.finish_reason, cached_tokens=record.cached_tokens)
            await self._write_finished(record, span.headers())

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        try:
            await self._slots.acquire()
        finally:
            self.queued -= 1
        self._run_beside(1)
        try:
            yield
        finally:
            self._run_beside(-1)
            self._slots.release()

    def _run_beside(self, change: int) -> None:
        self.running += change
        self.batch.note(self.running)

    async def _under_one_version(
        self, request: RequestedCompletion, run: Run, *, taken_s: float
    ) -> FinishedCompletion:
        """As `_generate`; an output under which the weights changed is read again."""
        for _ in range(_READINGS_MAX):
            with suppress(WeightsChangedError):
                return await self._generate(request, run, taken_s=taken_s)
            # The engine has the new weights' name a moment before this process knows of it.
            await asyncio.sleep(_BETWEEN_READINGS_S)
        refusal = Refused("error", "engine", "engine: its weights changed under each reading")
        return refused_completion(request, refusal)

    async def _generate(
        self, request: RequestedCompletion, run: Run, *, taken_s: float
    ) -> FinishedCompletion:
        # Not from `requested_ms`, which is of the gateway's clock: hosts' clocks may differ.
        queued_s = time.monotonic() - taken_s
        refusal = self._state.before_start(
            run.attempt, deadline_ms=request.deadline_ms, now_ms=now_ms()
        )
        if refusal is None and self._closed.done():
            refusal = self._closed.result()
        if refusal is not None:
            return refused_completion(request, refusal, timing=Timing(queued_s, 0.0))
        limits, weights = self._engine_limits, self._weights.served.weights
        assert limits is not None, "open() sets the limits"
        body = self._body(request, run, weights, limits)
        if isinstance(body, Refused):
            return refused_completion(request, body, timing=Timing(queued_s, 0.0))
        body["cache_salt"] = self._limits.cache_salt
        began, paused_s = self.batch.now(), self._pauses.total_s
        with self._groups.attending(request.episode_id) as where:
            answer = await self._ask(body | where, request, run.attempt)
        waited_s = time.monotonic() - began.at_s - (self._pauses.total_s - paused_s)
        if isinstance(answer, Refused):
            return refused_completion(request, answer, timing=Timing(queued_s, max(0.0, waited_s)))
        self._telemetry.count("inference.context_tokens", run.context.tokens_count)
        timing = timing_of(answer.meta_info, queued_s=queued_s, waited_s=waited_s)
        batch, load = self.batch.mean_since(began), self.batch.load
        timing = timing._replace(alone_s=alone_s(timing.engine_s, batch=batch, load=load))
        try:
            if request.given:
                return read_completion(request, answer, weights=weights, timing=timing)
            record = finished_completion(
                request,
                answer,
                limits=limits,
                timing=timing,
                is_cancelled=self._state.is_cancelled(run.attempt),
            )
            check_weights(record.spans, oldest=weights, newest=self._weights.newest_known)
        except InvalidAnswerError as error:
            refusal = Refused("error", "engine", f"engine: {error}")
            return refused_completion(request, refusal, timing=timing)
        return record

    def _body(
        self, request: RequestedCompletion, run: Run, weights: Weights, limits: EngineLimits
    ) -> dict[str, Any] | Refused:
        """What the engine is asked: to read the output that the request brings, or to sample."""
        rid = f"{request.request_id}.{request.attempt}.{self._limits.epoch}"
        if request.given:
            return reading_body(
                request, rid=rid, context=run.context, limits=limits, weights=weights
            )
        return generate_body(
            request,
            rid=rid,
            context=run.context,
            limits=limits,
            weights=weights,
            repetition=self._limits.repetition_stop,
        )

    async def _ask(
        self, body: dict[str, object], request: RequestedCompletion, attempt: Attempt
    ) -> EngineAnswer | Refused:
        deadline_ms = request.deadline_ms
        timeout_s = max(_TIMEOUT_MIN_S, (deadline_ms - now_ms()) / 1000)
        cancel, closed = _future(), self._closed
        self._cancels[attempt] = cancel
        generating = self._engine.generate(
            body, timeout_s=timeout_s, listener=self._listener(request)
        )
        call = asyncio.ensure_future(generating)
        try:
            ends: list[asyncio.Future[Any]] = [call, cancel, closed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not call.done() and not cancel.done():
                return closed.result()
            if not call.done():
                await self._abort(str(body["rid"]), call)
            return await self._result(call, str(body["rid"]), deadline_ms=deadline_ms)
        finally:
            call.cancel()
            del self._cancels[attempt]

    async def _abort(self, rid: str, call: "asyncio.Future[EngineAnswer]") -> None:
        """Abort the request in the engine; once more if the first came before the request did."""
        for _ in range(2):
            try:
                await self._engine.abort(rid)
            except EngineError as error:
                self._telemetry.event("abort_failed", rid=rid, error=str(error))
            if (await asyncio.wait([call], timeout=_ABORTED_WITHIN_S))[0]:
                return

    async def _result(
        self, call: "asyncio.Future[EngineAnswer]", rid: str, *, deadline_ms: int
    ) -> EngineAnswer | Refused:
        if not call.done():
            return CANCELLED
        try:
            return call.result()
        except EngineUnreachableError as error:
            if now_ms() >= deadline_ms:
                await self._abort(rid, call)
                return DEADLINE
            self._on_unreachable()
            return Refused("error", "engine", f"engine: {error}")
        except EngineError as error:
            return Refused("error", "engine", f"engine: {error}")

    def _listener(self, request: RequestedCompletion) -> LiveChunks | None:
        if not request.is_live:
            return None
        return LiveChunks(
            request,
            writer=self._writer,
            partition=self._partition(request.group_id),
            spawn=self._spawn,
            telemetry=self._telemetry,
        )

    def _partition(self, group_id: str) -> int:
        return group_partition(group_id, partitions=self._limits.group_partitions)

    async def _write_finished(self, record: FinishedCompletion, headers: Headers) -> None:
        partition = self._partition(record.group_id)
        output = Output(topic=topics.FINISHED_COMPLETIONS.name, partition=partition, record=record)
        emit = emit_of(output, headers=headers)
        # Sampled already: another process would sample it again.
        await patiently(lambda: self._writer.write(emit), telemetry=self._telemetry)
        tokens = len(record.output) // 4
        self.output_tokens_total += tokens
        self._telemetry.count("inference.finished", reason=end_of(record))
        self._telemetry.count("inference.output_tokens", tokens)
        for tier, cached in cached_by_tier(record).items():
            self._telemetry.count("inference.cached_tokens", cached, tier=tier)
        if (length := self._acceptance.observe(record)) is not None:
            self._telemetry.gauge("inference.acceptance_length", length, lane=record.lane)
        self._telemetry.observe("inference.queued_s", record.queued_s)
        self._telemetry.observe("inference.engine_s", record.engine_s)


def _future() -> "asyncio.Future[Refused]":
    return asyncio.get_running_loop().create_future()
