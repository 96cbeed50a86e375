"""One task of a transform service: one partition of its journal, its inputs and its core.

Life of a task:
1. Open the transactional writer, which fences older owners of the partition.
2. Restore: load the newest snapshot and run the journalled inputs after it; write nothing.
3. Live: commit each batch in one transaction with its outputs, journal record and positions.
So a task can be killed at any moment: its next owner continues with the same bytes.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from forgemq_bus.errors import OutOfRangeError
from forgemq_bus.log import READ_BYTES_MAX, Emit, Log, Place, Reader, Record, TransactionWriter
from forgemq_contracts.messages import Core, Output
from forgemq_shell.bad_record_limit import BadRecordLimit
from forgemq_shell.batch import BadRecord, Batch, stamped
from forgemq_shell.interruption import Turns, ends_before
from forgemq_shell.journal import JournalError
from forgemq_shell.patience import patiently
from forgemq_shell.records import emit_of
from forgemq_shell.restore import DivergedError, NewerLogicError, restore
from forgemq_shell.snapshots import Snapshots
from forgemq_shell.span_links import linked_traces
from forgemq_shell.task_plan import TaskPlan
from forgemq_telemetry.telemetry import Telemetry

_STOP_POLL_S = 0.25
"""Longest wait for records: how late an idle task sees `stop`."""

_LAG_EVERY_S = 15.0
"""Between two measurements of the lag: each asks the broker; dashboards scrape about as often."""


class TransformTask:
    """Runs one core over the log until `stop` is set.

    Args:
        core: Fresh.
        stop: Ends the task after its present batch.
        clock_s: Monotonic.
        turned: Called whenever the live loop turns.
    """

    def __init__(
        self,
        plan: TaskPlan,
        *,
        log: Log,
        core: Core,
        telemetry: Telemetry,
        stop: asyncio.Event,
        clock_s: Callable[[], float] = time.monotonic,
        turned: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._log = log
        self._core = core
        self._telemetry = telemetry
        self._stop = stop
        self._clock_s = clock_s
        self._turned = turned
        self._limit = BadRecordLimit(plan.settings)
        self._snapshots = Snapshots(plan, log=log, telemetry=telemetry, clock_s=clock_s)
        self._sequence = 0
        self._positions: dict[Place, int] = {}
        self._run_ms_start = 0
        self._run_ms = 0
        self._live_since_s = 0.0
        self._ticked_s = float("-inf")
        self._measured_s = float("-inf")
        self._commit_s = 0.0
        self._lost: Sequence[Record] = ()

    async def run(self) -> None:
        """Restore, then handle batches until stopped.

        Raises:
            FencedError: a newer owner exists.
            JournalError: the state cannot be rebuilt.
            DivergedError: the replay differs from the journal.
            NewerLogicError: the journal is that of a newer core.
            TooManyBadRecordsError: see `BadRecordLimit`.
        """
        writer = await self._log.transaction_writer(self._plan.transactional_id)
        try:
            await self._restore_and_run(writer)
        except (OutOfRangeError, JournalError, DivergedError, NewerLogicError):
            await self._check_owner(writer)
            raise
        finally:
            await writer.close()

    async def _restore_and_run(self, writer: TransactionWriter) -> None:
        if not await ends_before(self._stop, self._restore()):
            return
        if self._snapshots.is_due:
            await self._take_snapshot(writer)
        reader = await self._log.reader(self._positions)
        try:
            batch = await self._run_live(reader, writer)
        finally:
            await reader.close()
        await self._conclude(batch, writer)

    async def _check_owner(self, writer: TransactionWriter) -> None:
        """Raise FencedError if a newer owner exists.

        While this task stood still, a newer owner may have committed and its old journal and inputs
        may be trimmed. What this task reads then does not fit together, and says nothing about the
        log. Committing the journal's position as it stands changes nothing and shows who owns it.
        """
        plan = self._plan
        first = await self._log.first_positions([plan.journal])
        committed = await self._log.committed(group=plan.positions_group, places=[plan.journal])
        await writer.commit(
            outputs=(), group=plan.positions_group, positions={**first, **committed}
        )

    async def _restore(self) -> None:
        began_s, plan = self._clock_s(), self._plan
        restored = await restore(plan, log=self._log, core=self._core, telemetry=self._telemetry)
        self._positions = restored.positions
        self._sequence = restored.sequence
        self._run_ms_start = self._run_ms = restored.run_ms
        self._snapshots.begin(restored)
        self._lost = restored.lost
        self._live_since_s = self._clock_s()
        self._telemetry.observe(
            "transform.restore_s", self._live_since_s - began_s, partition=plan.journal.partition
        )

    async def _run_live(self, reader: Reader, writer: TransactionWriter) -> Batch:
        """Handle batches until stopped; returns the one that is not committed."""
        batch = self._new_batch()
        for record in self._lost:
            self._report_bad(batch.lose(record))
        while not self._stop.is_set():
            self._turned()
            records = await self._gather(reader)
            began_s = self._clock_s()
            self._tick_when_due(batch)
            await self._feed(batch, records)
            if records or batch.emits or len(batch.inputs) >= self._plan.settings.ticks_pending_max:
                await self._commit(batch, writer)
                batch = self._new_batch()
                self._telemetry.observe("transform.batch_s", self._clock_s() - began_s)
                if self._snapshots.is_due:
                    await self._take_snapshot(writer)
            await self._measure_lag(reader)
        return batch

    async def _conclude(self, batch: Batch, writer: TransactionWriter) -> None:
        """Leave a snapshot behind the last batch: the next owner has nothing to handle again.

        That owner may be a newer build of the core.
        """
        if not self._snapshots.batches_since:
            return
        if batch.inputs:
            await self._commit(batch, writer)
        await self._take_snapshot(writer, is_last=True)

    def _new_batch(self) -> Batch:
        return Batch(self._core, service=self._plan.service)

    async def _gather(self, reader: Reader) -> list[Record]:
        """Read the next records; [] if a tick or a stop comes first.

        Nothing is read while a batch is handled. That is the back-pressure: a task holds at most
        `batch_records_max` records and `batch_bytes_max` bytes, and one further value.
        """
        settings = self._plan.settings
        wait_s = _STOP_POLL_S
        if self._plan.tick_s > 0:
            wait_s = min(wait_s, self._tick_wait_s())
        records = await self._read(reader, timeout_s=wait_s)
        if not records:
            return records
        if len(records) < settings.read_records_max:
            # Sleep instead of reading on: each read of a few records costs the brokers a fetch.
            await asyncio.sleep(settings.linger_s(commit_s=self._commit_s))
        while more := await self._read(reader, timeout_s=0.0, behind=records):
            records.extend(more)
        return records

    async def _read(
        self, reader: Reader, *, timeout_s: float, behind: Sequence[Record] = ()
    ) -> list[Record]:
        """Read what fits in the batch behind these records; [] if it is full or none came."""
        settings = self._plan.settings
        room = settings.batch_records_max - len(behind)
        room_bytes = settings.batch_bytes_max - sum(len(record.value) for record in behind)
        if room <= 0 or room_bytes <= 0:
            return []
        return await reader.read(
            timeout_s=timeout_s,
            records_max=min(room, settings.read_records_max),
            bytes_max=min(room_bytes, READ_BYTES_MAX),
        )

    def _tick_when_due(self, batch: Batch) -> None:
        if self._plan.tick_s > 0 and self._tick_wait_s() == 0:
            self._tick(batch)

    def _tick_wait_s(self) -> float:
        """Seconds until the next tick is due; 0: it is due."""
        return max(0.0, self._ticked_s + self._plan.tick_s - self._clock_s())

    def _tick(self, batch: Batch) -> None:
        self._ticked_s = self._clock_s()
        live_ms = int((self._ticked_s - self._live_since_s) * 1000)
        self._run_ms = self._run_ms_start + live_ms
        batch.tick(self._run_ms)

    async def _feed(self, batch: Batch, records: Sequence[Record]) -> None:
        turns = Turns()
        for record in records:
            with self._telemetry.span(
                "transform",
                parent=record.headers,
                links=linked_traces(record) if self._telemetry.is_exporting else (),
                topic=record.topic,
                offset=record.offset,
            ) as span:
                bad = batch.record(record, headers=span.headers())
            if bad is None:
                self._limit.count_good(record.place)
            else:
                self._report_bad(bad)
            await turns.give()

    def _report_bad(self, bad: BadRecord) -> None:
        record = bad.record
        if bad.has_dead_letter:
            self._telemetry.count("transform.bad_records", topic=record.topic)
        else:
            self._telemetry.count("transform.bad_records_skipped", topic=record.topic)
        self._telemetry.event(
            "bad_record" if bad.has_dead_letter else "bad_record_skipped",
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=bad.reason,
        )
        self._limit.count_bad(record.place, bad.reason)

    async def _commit(self, batch: Batch, writer: TransactionWriter) -> None:
        plan, began_s = self._plan, self._clock_s()
        self._positions |= batch.positions
        outputs = [
            *stamped(batch.emits, task=plan.transactional_id, sequence=self._sequence),
            self._journal_emit(batch),
        ]
        positions = {**batch.positions, plan.journal: self._snapshots.journal_start}
        await patiently(
            lambda: writer.commit(outputs=outputs, group=plan.positions_group, positions=positions),
            telemetry=self._telemetry,
        )
        self._sequence += 1
        self._snapshots.count_batch()
        self._commit_s = self._clock_s() - began_s
        self._telemetry.observe("transform.commit_s", self._commit_s)
        self._telemetry.count("transform.batches")
        self._telemetry.count("transform.records", batch.records)
        self._telemetry.count("transform.outputs", len(batch.emits))

    def _journal_emit(self, batch: Batch) -> Emit:
        journalled = batch.journalled(
            sequence=self._sequence, logic_version=self._plan.logic_version
        )
        topic, partition = self._plan.journal
        return emit_of(Output(topic=topic, partition=partition, record=journalled))

    async def _take_snapshot(self, writer: TransactionWriter, *, is_last: bool = False) -> None:
        """Write the state behind the last batch; no input may have been handled since."""
        batch = self._snapshots.batch(
            self._core,
            sequence=self._sequence,
            positions=self._positions,
            run_ms=self._run_ms,
        )
        await self._snapshots.write(batch, writer)
        self._sequence += 1
        if not is_last:
            # The next owner reads the last one, and begins with an older one if it cannot.
            await self._snapshots.read_back(batch, writer)

    async def _measure_lag(self, reader: Reader) -> None:
        if not self._telemetry.is_exporting or self._clock_s() - self._measured_s < _LAG_EVERY_S:
            return
        self._measured_s = self._clock_s()
        ends = await self._log.end_positions(self._plan.inputs)
        lag = sum(max(0, end - reader.position(place)) for place, end in ends.items())
        self._telemetry.gauge("transform.lag_records", lag, partition=self._plan.journal.partition)
