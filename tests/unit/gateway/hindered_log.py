"""A log whose writers ask before each record: a test may let one wait or fail."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from forgemq_bus.log import Emit

Hinder = Callable[[Emit], Awaitable[None]]


class HinderedWriter:
    def __init__(self, writer: Any, hinder: Hinder) -> None:
        self._writer, self._hinder = writer, hinder

    async def write(self, emit: Emit) -> Any:
        await self._hinder(emit)
        return await self._writer.write(emit)

    async def commit(self, *, outputs: Sequence[Emit], **rest: Any) -> None:
        for emit in outputs:
            await self._hinder(emit)
        await self._writer.commit(outputs=outputs, **rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class HinderedLog:
    """A log with such writers."""

    def __init__(self, log: Any, hinder: Hinder) -> None:
        self._log, self._hinder = log, hinder

    async def writer(self) -> HinderedWriter:
        return HinderedWriter(await self._log.writer(), self._hinder)

    async def transaction_writer(self, transactional_id: str) -> HinderedWriter:
        return HinderedWriter(await self._log.transaction_writer(transactional_id), self._hinder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class LateWriter(HinderedWriter):
    """Commits, and says so only when the test lets it."""

    async def commit(self, *, outputs: Sequence[Emit], **rest: Any) -> None:
        await self._writer.commit(outputs=outputs, **rest)
        for emit in outputs:
            await self._hinder(emit)


class LateLog(HinderedLog):
    """A log with such writers of transactions."""

    async def transaction_writer(self, transactional_id: str) -> HinderedWriter:
        return LateWriter(await self._log.transaction_writer(transactional_id), self._hinder)
