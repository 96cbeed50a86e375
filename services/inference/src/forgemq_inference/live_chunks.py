"""Tells the gateway what an attempt has sampled so far, for a client that reads along."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_bus.log import Writer
from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import RequestedCompletion, SampledChunk
from forgemq_contracts.messages import Output
from forgemq_shell.records import emit_of
from forgemq_telemetry import Telemetry

Spawn: TypeAlias = Callable[[Coroutine[None, None, None]], object]

_EVERY_S = 0.1
"""Ten records a second and request; people read no faster."""
_SHARE_OF_TIME = 0.02
"""And at most one in this share of the time so far: each costs as much as all tokens before it, in
the engine's answer, here and in the gateway."""


class LiveChunks:
    """Chunks of one attempt, written one after the other; after a failed one the next has both."""

    def __init__(
        self,
        request: RequestedCompletion,
        *,
        writer: Writer,
        partition: int,
        spawn: Spawn,
        telemetry: Telemetry,
    ) -> None:
        """Nothing is sampled yet."""
        self._request = request
        self._writer = writer
        self._partition = partition
        self._spawn = spawn
        self._telemetry = telemetry
        self._told = 0
        self._is_writing = False
        self._started_s = self._due_s = _now_s()

    def is_due(self) -> bool:
        """Whether `tell` would write a chunk now."""
        return not self._is_writing and _now_s() >= self._due_s

    def tell(self, output_ids: list[int]) -> None:
        """Write what is new among all tokens sampled so far; returns at once."""
        added = output_ids[self._told :]
        if not added or not self.is_due():
            return
        chunk = SampledChunk(
            request_id=self._request.request_id,
            attempt=self._request.attempt,
            group_id=self._request.group_id,
            start=self._told,
            tokens=pack_ids(added),
        )
        now_s = _now_s()
        self._due_s = now_s + max(_EVERY_S, _SHARE_OF_TIME * (now_s - self._started_s))
        self._told = len(output_ids)
        self._is_writing = True
        self._spawn(self._write(chunk))

    async def _write(self, chunk: SampledChunk) -> None:
        output = Output(topic=topics.SAMPLED_CHUNKS.name, partition=self._partition, record=chunk)
        try:
            await self._writer.write(emit_of(output))
        except FINAL_ERRORS:
            raise
        except LogError as error:
            self._told = chunk.start
            self._telemetry.event("chunk_lost", request=chunk.request_id, error=str(error))
        finally:
            self._is_writing = False


def _now_s() -> float:
    return asyncio.get_running_loop().time()
