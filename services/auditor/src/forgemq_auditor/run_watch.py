"""Exports what the records of the run add up to: progress, staleness, guarantees, what stalls it.

The numbers are those of the panel and the page, for a dashboard and its alerts. Without an exporter
nothing is read. It reads finished-completions too, so a run that exports its metrics has one more
reader of them.
"""

import asyncio

import msgspec

from forgemq_audit import guarantees
from forgemq_audit.guarantees import Ledger
from forgemq_auditor.rounds import repeat
from forgemq_auditor.run_metrics import export_state, export_verdicts
from forgemq_bus.kept_records import message_of, read_from
from forgemq_bus.log import Log, Place, Record
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.run import StartedRun
from forgemq_contracts.topics import Topic
from forgemq_run_view import view
from forgemq_run_view.report import GuaranteeVerdict
from forgemq_run_view.view import RunView
from forgemq_shell.clock import now_ms
from forgemq_shell.service import Context

TOPICS: tuple[Topic, ...] = tuple({t.name: t for t in (*view.TOPICS, *guarantees.TOPICS)}.values())


async def keep_watched(context: Context, *, every_s: float) -> None:
    """Export the state of the run until the service stops, if anything is exported."""
    if not context.telemetry.is_exporting:
        return
    run_watch = RunWatch(context.log, context.started)

    async def look() -> None:
        await run_watch.read_on()
        # Both are sums over all groups of the run: the audit goes on meanwhile.
        state = await asyncio.to_thread(run_watch.view.state, now_ms=now_ms())
        verdicts = await asyncio.to_thread(
            run_watch.ledger.verdicts, is_ended=False, is_audit_behind=True
        )
        export_state(state, context.telemetry)
        export_verdicts(run_watch.confirmed(verdicts), context.telemetry)

    await repeat(context, look, every_s=every_s, failed="watch_failed")


class RunWatch:
    """The records of one run, read again and again to their end.

    Lifecycle: `read_on` at intervals; `view` and `ledger` may be read between its calls. What a
    round that failed has read counts, and the next one goes on behind it.
    """

    def __init__(self, log: Log, started: StartedRun) -> None:
        self.view = RunView(started)
        self.ledger = Ledger(started.configuration)
        self._log = log
        self._places = [p for topic in TOPICS for p in partitions_of(topic, started.configuration)]
        self._next: dict[Place, int] = {}
        self._counted: dict[str, int] = {}

    async def read_on(self) -> None:
        """Take in what is new on the log.

        Raises:
            LogError: the log does not answer.
        """
        if not self._next:
            self._next = await self._log.first_positions(self._places)
        ends = await self._log.end_positions(self._places)
        behind = {place: at for place, at in self._next.items() if at < ends[place]}
        async for records in read_from(
            self._log, behind, ends={place: ends[place] for place in behind}
        ):
            for record in records:
                if record.offset < ends[record.place]:
                    self._apply(record)
                    self._next[record.place] = record.offset + 1
        self._next |= ends

    def confirmed(self, verdicts: tuple[GuaranteeVerdict, ...]) -> dict[str, int]:
        """Violations of each guarantee that the verdicts before had too.

        The ends of two topics are not of one moment, so a record may be there whose cause is read
        in the next round.
        """
        counted: dict[str, int] = {each.name: len(each.violations) for each in verdicts}
        before, self._counted = self._counted, counted
        return {name: min(count, before.get(name, 0)) for name, count in counted.items()}

    def _apply(self, record: Record) -> None:
        try:
            message = message_of(record)
        except msgspec.MsgspecError:
            return  # Its own reader writes the dead letter.
        self.view.apply(message)
        self.ledger.apply(message)
