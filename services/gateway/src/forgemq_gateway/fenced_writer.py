"""Writes what clients are promised, in transactions that the next owner of a group ends.

A gateway may lose a group while a record of it is on its way. If that record became durable behind
what the new owner reads, it would count over what the new owner answers meanwhile. So each gateway
has a transactional writer of its own name, and a new owner opens a writer of that name before it
reads: from then on nothing that was on its way becomes durable. The gateway whose writer was
fenced opens it again, reads who owns what by then, and writes on for the groups that it still has.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from forgemq_bus.errors import FencedError, LogError, LogUnavailableError
from forgemq_bus.log import Emit, Log, TransactionWriter
from forgemq_gateway import ownership
from forgemq_gateway.core.errors import MovedError
from forgemq_gateway.core.gateways import Gateways
from forgemq_gateway.ownership import ReadBack

_ENDED = "this gateway has ended: ask another one"


def writer_of(gateway: str) -> str:
    """The transactional id of a gateway."""
    return f"gateway-{gateway}"


class _Waiting(NamedTuple):
    """A record to write, and who waits for it."""

    emit: Emit
    group_id: str
    tenure: int
    written: asyncio.Future[None]

    def resolve(self, error: Exception | None = None) -> None:
        """Let the waiting task go on, if it still waits."""
        if self.written.done():
            return
        if error is None:
            self.written.set_result(None)
        else:
            self.written.set_exception(error)


class FencedWriter:
    """One commit at a time; what comes meanwhile goes into the next one together.

    Args:
        tasks: Owns the commits: a client that leaves ends none of them halfway.
    """

    def __init__(
        self, log: Log, *, gateways: Gateways, read_back: ReadBack, tasks: asyncio.TaskGroup
    ) -> None:
        self._log = log
        self._gateways = gateways
        self._read_back = read_back
        self._tasks = tasks
        self._name = writer_of(gateways.gateway)
        self._writer: TransactionWriter | None = None
        self._alone = asyncio.Lock()
        self._waiting: list[_Waiting] = []
        self._taken: list[_Waiting] = []
        self._is_writing = False

    async def write(self, emit: Emit, *, group_id: str, tenure: int) -> None:
        """Write a record about a group; returns when it is durable.

        Args:
            emit: The record.
            group_id: Its group.
            tenure: Of the gateway over the group (`Gateways.tenure`) when the record was decided.

        Raises:
            MovedError: the gateway has lost the group since; the record is not written.
            LogUnavailableError: no answer in time; the record may still be on the log.
        """
        written = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(emit, group_id, tenure, written))
        self._begin()
        await written

    async def fence(self, gateway: str) -> None:
        """Return when nothing that this gateway has on its way can become durable any more.

        The gateway may be this one, from a time when it owned the same groups before.

        Raises:
            LogError: it is not known.
        """
        if gateway == self._gateways.gateway:
            async with self._alone:
                await self._drop()
                await self._opened()
        else:
            await (await self._log.transaction_writer(writer_of(gateway))).close()

    def _begin(self) -> None:
        if self._is_writing:
            return
        writing = self._write_waiting()
        try:
            task = self._tasks.create_task(writing)
        except RuntimeError:  # The group takes no task once it ends.
            writing.close()
            self._give_up(self._waiting)
            return
        self._is_writing = True
        task.add_done_callback(self._end_writing)

    async def _write_waiting(self) -> None:
        while self._waiting:
            self._taken, self._waiting = self._waiting, []
            await self._write(self._taken)

    def _end_writing(self, task: asyncio.Task[None]) -> None:
        """Begin again if records came since; a task that ended early leaves nobody waiting."""
        self._is_writing = False
        if task.cancelled() or task.exception() is not None:
            self._give_up([*self._taken, *self._waiting])
        elif self._waiting:
            self._begin()

    def _give_up(self, left: Sequence[_Waiting]) -> None:
        """Leave nobody waiting: nothing more is written here."""
        self._fail(left, LogUnavailableError(_ENDED))
        self._waiting.clear()

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        """Write these records, or say to each who waits why it is not written."""
        try:
            await self._commit(batch)
        except LogUnavailableError as error:
            self._fail(batch, error)
        except LogError as error:
            if len(batch) == 1:
                self._fail(batch, error)
                return
            # It may be about one of them; the others are nobody's fault.
            for each in batch:
                await self._write([each])

    def _fail(self, batch: Sequence[_Waiting], error: LogError) -> None:
        for each in batch:
            each.resolve(error)

    async def _commit(self, batch: Sequence[_Waiting]) -> None:
        """Write in one transaction what still belongs here; a fenced one is written again.

        Raises:
            LogError: it may be on the log, or not.
        """
        async with self._alone:
            while True:
                try:
                    writer = await self._opened()
                    held = [each for each in batch if self._is_held(each)]
                    await writer.commit(
                        outputs=[each.emit for each in held], group=self._name, positions={}
                    )
                except FencedError:
                    await self._drop()
                    continue
                except LogError:
                    await self._drop()
                    raise
                break
        for each in held:
            each.resolve()

    def _is_held(self, waiting: _Waiting) -> bool:
        """Whether the gateway still has the group; if not, the one who waits gets an error."""
        if self._gateways.tenure(waiting.group_id) == waiting.tenure:
            return True
        waiting.resolve(MovedError(waiting.group_id))
        return False

    async def _opened(self) -> TransactionWriter:
        """The open writer. Who has fenced the one before owns what it took: read who owns what."""
        if self._writer is None:
            writer = await self._log.transaction_writer(self._name)
            try:
                await self._read_back.until_now([ownership.PLACE])
            except BaseException:  # Also on a cancellation: an open writer is a connection.
                with suppress(LogError):
                    await writer.close()
                raise
            self._writer = writer
        return self._writer

    async def _drop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(LogError):
                await writer.close()
