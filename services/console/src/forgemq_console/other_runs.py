"""Runs of the broker beside the console's own: listed, opened when somebody looks, compared."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from forgemq_audit.run_reader import RunReader
from forgemq_audit.run_report import report_from_audits
from forgemq_bus.errors import BlobError
from forgemq_bus.log import Log
from forgemq_console.core import ComparedRun, GroupView, RunRow, bounded
from forgemq_console.group_reading import group_reader, token_text_of
from forgemq_contracts.run import StartedRun
from forgemq_shell.announced_runs import AnnouncedRun, announced_runs

OPEN_MAX = 4
"""Runs held in memory beside the console's own: two that are compared, and two that are read."""
READ_EVERY_S = 1.0
"""Pages ask once a second; several pages of one run cost no more than one."""


class UnknownRunError(Exception):
    """The run is not on the broker; the text says so for people."""


class Broker(NamedTuple):
    """How runs of a broker are reached.

    Attributes:
        open_log: The log of a run; raises ValueError or ImportError for an address of blobs that
            this process cannot read.
        present: Ids of the runs that have topics.
    """

    open_log: Callable[[StartedRun], Log]
    present: Callable[[], Awaitable[Collection[str]]]


class OpenRun:
    """A run that is read from its log whenever somebody asks.

    Lifecycle: `read_on` before each look at `view`; `close` at the end, once `uses` is 0.
    """

    def __init__(
        self, log: Log, started: StartedRun, *, episodes_max: int, read_every_s: float
    ) -> None:
        self._log = log
        self._started = started
        self._reader = RunReader(log, started, without_blobs=self._leave_out)
        self._reading = asyncio.Lock()
        self._read_every_s = read_every_s
        self._read_s = -read_every_s
        self._read_group = group_reader(
            log,
            self._reader.view,
            token_text=token_text_of(Path(started.configuration.model.path)),
            episodes_max=episodes_max,
        )
        self.view = self._reader.view
        self.left_out = ""
        self.uses = 0

    async def read_on(self) -> None:
        """Take in what is new on the log."""
        async with self._reading:
            if time.monotonic() - self._read_s >= self._read_every_s:
                await self._reader.catch_up()
                self._read_s = time.monotonic()

    async def read_group(self, group_id: str, episode_id: str | None) -> GroupView:
        """A group's episodes, one of them in full."""
        return await self._read_group(group_id, episode_id)

    async def compared(self, *, now_ms: int) -> ComparedRun:
        """Its curves and its report, as far as auditors have compared its groups."""
        await self.read_on()
        end = self.view.end
        at_ms = end.ended_ms if end else now_ms
        made = await report_from_audits(
            self._log,
            self._started,
            self._reader,
            reason=end.reason if end else "",
            now_ms=at_ms,
        )
        state = bounded(self.view.state(now_ms=at_ms))
        return ComparedRun(state=state, report=made, left_out=self.left_out)

    async def close(self) -> None:
        """Close its log."""
        await self._log.close()

    def _leave_out(self, error: BlobError) -> None:
        self.left_out = str(error)


class OtherRuns:
    """Every run of the broker, opened when somebody looks at it.

    Lifecycle: any call until `close`. At most `OPEN_MAX` runs stay open while nobody looks: the one
    that nobody has looked at for longest is closed for the next, after all who look at it now.

    Args:
        log: Any log of the broker, for the topics that all runs share.
        broker: Opens the others.
        episodes_max: See `ConsoleSettings.episodes_shown_max`.
        read_every_s: At least between two reads of one run.
    """

    def __init__(
        self,
        log: Log,
        broker: Broker,
        *,
        episodes_max: int,
        read_every_s: float = READ_EVERY_S,
    ) -> None:
        self._log = log
        self._broker = broker
        self._episodes_max = episodes_max
        self._read_every_s = read_every_s
        self._open: dict[str, OpenRun] = {}
        self._opening = asyncio.Lock()

    async def rows(self) -> tuple[RunRow, ...]:
        """The runs whose records are on the broker, the newest first."""
        present = await self._broker.present()
        announced = await announced_runs(self._log)
        return tuple(_row(each) for each in announced if each.started.run in present)

    @asynccontextmanager
    async def opened(self, run: str) -> AsyncIterator[OpenRun]:
        """This run, with what its log has now; it stays open in this block.

        Raises:
            UnknownRunError: it is not on the broker.
            LogError: the broker does not answer, or does not let this process read the run.
        """
        async with self._opening:
            found = self._open.pop(run, None) or await self._new(run)
            self._open[run] = found  # The newest is the last.
            found.uses += 1
            while len(self._open) > OPEN_MAX:
                left = self._open.pop(next(iter(self._open)))
                if not left.uses:
                    await left.close()
        try:
            await found.read_on()
            yield found
        finally:
            found.uses -= 1
            if not found.uses and found not in self._open.values():
                await found.close()

    async def close(self) -> None:
        """Close every run."""
        while self._open:
            await self._open.popitem()[1].close()

    async def _new(self, run: str) -> OpenRun:
        announced = {each.started.run: each.started for each in await announced_runs(self._log)}
        if run not in announced:
            raise UnknownRunError(f"there is no run {run} on this broker")
        if run not in await self._broker.present():
            raise UnknownRunError(f"run {run} has no topics that this console may read")
        try:
            log = self._broker.open_log(announced[run])
        except (ImportError, ValueError) as error:
            address = announced[run].blobs
            raise UnknownRunError(f"the blobs of run {run} are in {address}: {error}") from error
        return OpenRun(
            log,
            announced[run],
            episodes_max=self._episodes_max,
            read_every_s=self._read_every_s,
        )


def _row(announced: AnnouncedRun) -> RunRow:
    started, ended = announced.started, announced.ended
    configuration = started.configuration
    return RunRow(
        run=started.run,
        started_ms=started.started_ms,
        ended=ended.reason if ended else "",
        ended_ms=ended.ended_ms if ended else None,
        steps=configuration.trainer.steps,
        seed=configuration.seed,
        model=Path(configuration.model.path).name,
        domains=tuple(queue.domain for queue in configuration.queues),
        results={each.name: each.value for each in ended.results} if ended else {},
    )
