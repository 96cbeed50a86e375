"""Asks a teacher's engine about outputs; one that does not answer leaves them without its word."""

import asyncio
from typing import Any

import msgspec

from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.distillation import Distillation
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.engine_answer import InvalidAnswerError
from forgemq_inference.core.lane import Refused
from forgemq_inference.core.reading import read_logprobs
from forgemq_inference.core.teaching import is_taught, teaching_body
from forgemq_inference.engine import Engine, EngineError
from forgemq_telemetry import Telemetry

_TRIES = 3
_BETWEEN_TRIES_S = 0.5


class Teacher:
    """One teacher. Its engine keeps the weights that it started with."""

    def __init__(self, engine: Engine, settings: Distillation, *, telemetry: Telemetry) -> None:
        """Ask nothing yet; the engine is open as long as this is used."""
        self._engine = engine
        self._settings = settings
        self._telemetry = telemetry

    async def taught_before(
        self, end: "asyncio.Future[Refused]", record: FinishedCompletion, context: TokenContext
    ) -> FinishedCompletion | None:
        """As `taught`; None if the end comes first, so that another lane is to have the request."""
        call = asyncio.ensure_future(self.taught(record, context))
        ends: list[asyncio.Future[Any]] = [call, end]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else None
        finally:
            call.cancel()

    async def taught(self, record: FinishedCompletion, context: TokenContext) -> FinishedCompletion:
        """The record with the teacher's log-probabilities, or as it is.

        Without them its group does not train, and the event `teacher_failed` says why.
        """
        if not is_taught(record):
            return record
        body, error = teaching_body(context, record.output), ""
        for number in range(_TRIES):
            if number:
                await asyncio.sleep(_BETWEEN_TRIES_S)
            try:
                answer = await self._engine.generate(body, timeout_s=self._settings.timeout_s)
                logprobs = read_logprobs(answer, record.output)
            except (EngineError, InvalidAnswerError) as failure:
                error = str(failure)
                continue
            return msgspec.structs.replace(record, teacher_logprobs=logprobs)
        self._telemetry.event("teacher_failed", request_id=record.request_id, error=error)
        self._telemetry.count("inference.teacher_failed")
        return record
