"""A lane that answers by script: a participant of the log, as an inference process is.

It reads requested-completions of its partition, decides by script, and writes FinishedCompletion,
deltas and errors included.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal

import msgspec

from forgemq_bus.log import Log, Place
from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_floats, pack_ids, unpack_ids
from forgemq_contracts.completions import (
    FailureKind,
    FinishedCompletion,
    RequestedCompletion,
    SampledChunk,
    TopTokens,
    WeightSpan,
)
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.weights import ReportedEngine
from forgemq_rendering import Rendering
from forgemq_shell.records import emit_of

GROUP_PARTITIONS = 3

Script = Callable[["Asked"], Awaitable[str] | str]


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def contexts_of(records: list[Any]) -> dict[str, list[int]]:
    """Context + output of every finished completion, from parents and deltas."""
    whole: dict[str, list[int]] = {}
    for record in records:
        parent = whole.get(record.parent_id or "", [])
        context = [*parent[: record.shared_prefix_tokens], *unpack_ids(record.context)]
        whole[record.request_id] = [*context, *unpack_ids(record.output)]
    return whole


class Asked(msgspec.Struct):
    """One request as a lane has it: with all tokens, and as text."""

    record: RequestedCompletion
    context: list[int]
    text: str


class FailAttempt(Exception):  # noqa: N818 - a script raises it on purpose
    """Raised by a script to let this attempt fail."""

    def __init__(
        self, error: str, *, failure: FailureKind = "engine", is_constraint_refused: bool = False
    ) -> None:
        super().__init__(error)
        self.failure = failure
        self.is_constraint_refused = is_constraint_refused


class ScriptedLane:
    """One lane of one epoch. A script gives the text of each answer.

    Attributes:
        engine_s: What it says that each request took; None: what it took.
    """

    def __init__(
        self, log: Log, rendering: Rendering, script: Script, *, lane: int = 0, epoch: int = 1
    ) -> None:
        self.lane, self.epoch = lane, epoch
        self.seen: list[Asked] = []
        self.known: dict[str, list[int]] = {}
        self.is_silent = False
        self.version = 0
        self.engine_s: float | None = None
        self._arrived = asyncio.Event()
        self._working: set[asyncio.Task[None]] = set()
        self._log = log
        self._rendering = rendering
        self._script = script

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        self._writer = await self._log.writer()
        place = Place(topics.REQUESTED_COMPLETIONS.name, self.lane)
        ends = await self._log.end_positions([place])
        reader = await self._log.reader(ends)
        await self.report()
        self._work(tasks, self._heartbeat())
        while True:
            for record in await reader.read(timeout_s=0.2, records_max=100):
                asked = topics.decode(topics.REQUESTED_COMPLETIONS, record.value)
                assert isinstance(asked, RequestedCompletion)
                if asked.epoch == self.epoch and not self.is_silent:
                    self._work(tasks, self._serve(asked))

    def _work(self, tasks: asyncio.TaskGroup, work: Coroutine[None, None, None]) -> None:
        task = tasks.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    def stop(self) -> None:
        """End everything this lane does."""
        for task in list(self._working):
            task.cancel()

    async def tell(self, asked: "Asked", text: str, *, start: int = 0) -> int:
        """Write tokens of an attempt that is still sampled; returns how many it has now."""
        ids = self._rendering.encode(text)
        partition = group_partition(asked.record.group_id, partitions=GROUP_PARTITIONS)
        chunk = SampledChunk(
            request_id=asked.record.request_id,
            attempt=asked.record.attempt,
            group_id=asked.record.group_id,
            start=start,
            tokens=pack_ids(ids),
        )
        await self._write(topics.SAMPLED_CHUNKS, partition, chunk)
        return start + len(ids)

    async def has_seen(self, count: int) -> None:
        """Wait until so many requests have come."""
        async with asyncio.timeout(10):
            while len(self.seen) < count:
                self._arrived.clear()
                await self._arrived.wait()

    async def _heartbeat(self) -> None:
        while not self.is_silent:
            await asyncio.sleep(0.3)
            await self.report()

    async def report(self, *, is_serving: bool = True, detail: str = "") -> None:
        await self._write(
            topics.REPORTED_ENGINES,
            self.lane,
            ReportedEngine(
                lane=self.lane,
                epoch=self.epoch,
                url=f"http://engine:{self.lane}",
                is_serving=is_serving,
                lineage=0,
                version=self.version,
                running=0,
                queued=0,
                reported_ms=wall_ms(),
                detail=detail,
            ),
        )

    async def _serve(self, record: RequestedCompletion) -> None:
        started_ms = wall_ms()
        parent = self.known.get(record.parent_id or "", [])
        own = unpack_ids(record.context)
        if record.is_delta and len(parent) < record.shared_prefix_tokens:
            await self._finish(
                record, b"", reason="error", failed=FailAttempt("lost", failure="context_missing")
            )
            return
        context = [*parent[: record.shared_prefix_tokens], *own] if record.is_delta else own
        delta = context[record.shared_prefix_tokens :]
        asked = Asked(record=record, context=context, text=self._rendering.decode(context))
        self.seen.append(asked)
        self._arrived.set()
        try:
            answer = self._script(asked)
            text = answer if isinstance(answer, str) else await answer
        except FailAttempt as failure:
            await self._finish(record, pack_ids(delta), reason="error", failed=failure)
            return
        ids, reason, stop = sampled_as(
            text,
            self._rendering,
            stops=record.sampling.stop,
            tokens_max=record.sampling.max_tokens,
        )
        self.known[record.request_id] = [*context, *ids]
        took_s = (wall_ms() - started_ms) / 1000
        engine_s = took_s if self.engine_s is None else self.engine_s
        await self._finish(
            record, pack_ids(delta), reason=reason, ids=ids, engine_s=engine_s, stop=stop
        )

    async def _finish(
        self,
        record: RequestedCompletion,
        context: bytes,
        *,
        reason: Any,
        ids: list[int] | None = None,
        engine_s: float = 0.0,
        failed: FailAttempt | None = None,
        stop: str = "",
    ) -> None:
        output = ids or []
        await self._write(
            topics.FINISHED_COMPLETIONS,
            group_partition(record.group_id, partitions=GROUP_PARTITIONS),
            FinishedCompletion(
                request_id=record.request_id,
                attempt=record.attempt,
                episode_id=record.episode_id,
                group_id=record.group_id,
                lane=self.lane,
                epoch=self.epoch,
                finish_reason=reason,
                turn=record.turn,
                parent_id=record.parent_id,
                shared_prefix_tokens=record.shared_prefix_tokens,
                context=context,
                output=pack_ids(output),
                logprobs=pack_floats([-0.5] * len(output)),
                top_tokens=_top(output, record.top_tokens) if record.top_tokens else None,
                spans=(self._span(len(output)),) if output else (),
                engine_s=engine_s,
                stop_string=stop,
                error="" if failed is None else str(failed),
                failure=None if failed is None else failed.failure,
                is_constraint_refused=failed is not None and failed.is_constraint_refused,
            ),
        )

    def _span(self, count: int) -> WeightSpan:
        return WeightSpan(start=0, end=count, lineage=0, version=self.version)

    async def _write(self, topic: topics.Topic, partition: int, record: msgspec.Struct) -> None:
        output = Output(topic=topic.name, partition=partition, record=record)
        await self._writer.write(emit_of(output))


def sampled_as(
    text: str, rendering: Rendering, *, stops: Sequence[str], tokens_max: int
) -> tuple[list[int], Literal["stop", "length"], str]:
    """The tokens of an answer, why it ended, and the stop string that ended it."""
    stop, ends = _ended(text, stops)
    ids = rendering._tokenizer.encode(text[:ends])
    ids += [] if stop else [rendering.stop_token_ids[0]]
    return (ids[:tokens_max], "length", "") if len(ids) > tokens_max else (ids, "stop", stop)


def _top(output: Sequence[int], number: int) -> TopTokens:
    """The sampled token, then the ids from 100 on; the last one is impossible."""
    logprobs = [-0.5, *(-1.0 - rank for rank in range(number - 1))]
    return TopTokens(
        ids=pack_ids(each for token in output for each in (token, *range(100, 99 + number))),
        logprobs=pack_floats([*logprobs[:-1], float("-inf")] * len(output)),
    )


def _ended(text: str, stops: Sequence[str]) -> tuple[str, int | None]:
    """The stop string that comes first in the text, and where it ends; as SGLang stops."""
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    return (min(found)[1], min(found)[0]) if found else ("", None)
