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
from dataclasses import dataclass

from forgemq_bus.errors import OutOfRangeError
from forgemq_bus.log import Emit, Log, Place, Reader, Record, TransactionWriter
from forgemq_contracts import topics
from forgemq_contracts.journal import JournalledBatch
from forgemq_contracts.messages import Core, Output
from forgemq_shell.bad_record_limit import BadRecordLimit
from forgemq_shell.batch import BadRecord, Batch, stamped
from forgemq_shell.journal import (
    JournalError,
    JournalledInputs,
    read_journal,
    since_newest_snapshot,
)
from forgemq_shell.records import emit_of
from forgemq_shell.replay import begin, replay
from forgemq_shell.restored_positions import restored_positions
from forgemq_shell.span_links import linked_traces
from forgemq_shell.transform_settings import TransformSettings
from forgemq_telemetry.telemetry import Telemetry

_STOP_POLL_S = 0.25
"""Longest wait for records: how late an idle task sees `stop`."""

_YIELD_AFTER_S = 0.02
"""Longest run of the core without a pause: short beside a heartbeat of group membership (1 s)."""

_LAG_EVERY_S = 15.0
"""Between two measurements of the lag: each asks the broker; dashboards scrape about as often."""


class DivergedError(Exception):
    """The core's replay differs from what its journal says it wrote.

    Either the core is not deterministic, or its code or the run's configuration changed after the
    journal was written. The task writes nothing: a run must be finished by code that writes the
    same bytes. (`logic_version` in the configuration records which logic a run was started with;
    no code branches on it, so setting it does not help here.)
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """What a task reads and writes, fixed for its life.

    Attributes:
        service: Prefix of the transactional id and of the consumer groups with its positions.
        journal: Its partition of the service's journal.
        inputs: Every partition that the task reads.
        tick_s: Seconds between two ticks; 0: the core gets none.
        logic_version: From the run's configuration; written into every journal record.
    """

    service: str
    journal: Place
    inputs: tuple[Place, ...]
    tick_s: float
    logic_version: int
    settings: TransformSettings

    @property
    def transactional_id(self) -> str:
        """Names the owner of the partition: a newer writer with this id fences the older one."""
        return f"{self.service}-{self.journal.partition}"

    @property
    def positions_group(self) -> str:
        """Consumer group of the positions that each batch commits in its transaction."""
        return f"{self.service}-positions"

    @property
    def needed_group(self) -> str:
        """Consumer group of the input positions that a restart needs; set at each snapshot."""
        return topics.needed_group(self.service)


class TransformTask:
    """Runs one core over the log until `stop` is set.

    Args:
        core: Fresh.
        stop: Ends the task after its present batch.
        clock_s: Monotonic.
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
    ) -> None:
        self._plan = plan
        self._log = log
        self._core = core
        self._telemetry = telemetry
        self._stop = stop
        self._clock_s = clock_s
        self._limit = BadRecordLimit(plan.settings)
        self._sequence = 0
        self._positions: dict[Place, int] = {}
        self._journal_start = 0
        self._run_ms_start = 0
        self._live_since_s = 0.0
        self._ticked_s = float("-inf")
        self._lag_s = float("-inf")
        self._snapshot_s = 0.0
        self._snapshot_sequence = 0

    async def run(self) -> None:
        """Restore, then handle batches until stopped.

        Raises:
            FencedError: a newer owner exists.
            JournalError: the state cannot be rebuilt.
            DivergedError: the replay differs from the journal.
            TooManyBadRecordsError: see `BadRecordLimit`.
        """
        writer = await self._log.transaction_writer(self._plan.transactional_id)
        try:
            await self._restore_and_run(writer)
        except (OutOfRangeError, JournalError, DivergedError):
            await self._check_owner(writer)
            raise
        finally:
            await writer.close()

    async def _restore_and_run(self, writer: TransactionWriter) -> None:
        await self._restore()
        reader = await self._log.reader(self._positions)
        try:
            await self._run_live(reader, writer)
        finally:
            await reader.close()

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
        places = (plan.journal, *plan.inputs)
        committed = await self._log.committed(group=plan.positions_group, places=places)
        # Asked for last: what is not committed is not trimmed, so these are still the first ones.
        first = await self._log.first_positions(places)
        self._journal_start = committed.get(plan.journal, first[plan.journal])
        end = (await self._log.end_positions([plan.journal]))[plan.journal]
        kept = await read_journal(self._log, plan.journal, start=self._journal_start, end=end)
        batches = since_newest_snapshot(kept)
        self._positions = restored_positions(
            plan.inputs, batches=batches, committed=committed, first=first
        )
        await self._replay(batches)
        ticks = [item.tick_ms for batch in kept for item in batch.inputs if not item.topic]
        self._run_ms_start = max(ticks, default=0)
        self._sequence = kept[-1].sequence + 1 if kept else 0
        self._snapshot_sequence = self._sequence
        self._live_since_s = self._snapshot_s = self._clock_s()
        self._telemetry.observe(
            "transform.restore_s", self._live_since_s - began_s, partition=plan.journal.partition
        )

    async def _replay(self, batches: Sequence[JournalledBatch]) -> None:
        """Bring the core to the state after the last journalled batch; write nothing."""
        left = begin(self._core, batches)
        inputs = JournalledInputs(self._log, clock_s=self._clock_s)
        try:
            await inputs.open(left)
            async for replayed in replay(
                self._core, left, inputs=inputs, service=self._plan.service
            ):
                if not replayed.is_same:
                    raise DivergedError(
                        f"{self._plan.transactional_id}: batch {replayed.batch.sequence} wrote "
                        f"{replayed.batch.outputs} records with digest "
                        f"{replayed.batch.outputs_digest}, its replay {len(replayed.emits)} with "
                        f"{replayed.digest}"
                    )
        finally:
            await inputs.close()

    async def _run_live(self, reader: Reader, writer: TransactionWriter) -> None:
        batch = self._new_batch()
        while not self._stop.is_set():
            records = await self._gather(reader)
            began_s = self._clock_s()
            self._tick_when_due(batch)
            await self._feed(batch, records)
            if records or batch.emits or len(batch.inputs) >= self._plan.settings.ticks_pending_max:
                await self._commit(batch, writer)
                batch = self._new_batch()
                self._telemetry.observe("transform.batch_s", self._clock_s() - began_s)
            await self._measure_lag(reader)

    def _new_batch(self) -> Batch:
        return Batch(self._core, service=self._plan.service)

    async def _gather(self, reader: Reader) -> list[Record]:
        """Read the next records; [] if a tick or a stop comes first.

        Nothing is read while a batch is handled. That is the back-pressure: a task holds at most
        `batch_records_max` records and about `batch_bytes_max` bytes.
        """
        settings = self._plan.settings
        wait_s = _STOP_POLL_S
        if self._plan.tick_s > 0:
            wait_s = min(wait_s, self._tick_wait_s())
        records = await self._read(reader, timeout_s=wait_s, room=settings.batch_records_max)
        if not records:
            return records
        if len(records) < settings.read_records_max:
            # Sleep instead of reading on: each read of a few records costs the brokers a fetch.
            await asyncio.sleep(settings.batch_linger_s)
        size = sum(len(record.value) for record in records)
        while len(records) < settings.batch_records_max and size < settings.batch_bytes_max:
            room = settings.batch_records_max - len(records)
            more = await self._read(reader, timeout_s=0.0, room=room)
            if not more:
                break
            records.extend(more)
            size += sum(len(record.value) for record in more)
        return records

    async def _read(self, reader: Reader, *, timeout_s: float, room: int) -> list[Record]:
        records_max = min(room, self._plan.settings.read_records_max)
        return await reader.read(timeout_s=timeout_s, records_max=records_max)

    def _tick_when_due(self, batch: Batch) -> None:
        if self._plan.tick_s > 0 and self._tick_wait_s() == 0:
            self._tick(batch)

    def _tick_wait_s(self) -> float:
        """Seconds until the next tick is due; 0: it is due."""
        return max(0.0, self._ticked_s + self._plan.tick_s - self._clock_s())

    def _tick(self, batch: Batch) -> None:
        self._ticked_s = self._clock_s()
        live_ms = int((self._ticked_s - self._live_since_s) * 1000)
        batch.tick(self._run_ms_start + live_ms)

    async def _feed(self, batch: Batch, records: Sequence[Record]) -> None:
        yielded_s = self._clock_s()
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
            if self._clock_s() - yielded_s > _YIELD_AFTER_S:
                # Heartbeats of group membership run on the same event loop and must not starve.
                await asyncio.sleep(0)
                yielded_s = self._clock_s()

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
        snapshot = None
        if self._is_snapshot_due():
            if plan.tick_s > 0:
                # A restart continues run time from the journal's last tick. The batches before the
                # snapshot may be trimmed, so the snapshot's batch must hold one.
                self._tick(batch)
            snapshot = self._core.snapshot()
            self._journal_start = (await self._log.end_positions([plan.journal]))[plan.journal]
        self._positions |= batch.positions
        await writer.commit(
            outputs=[
                *stamped(batch.emits, task=plan.transactional_id, sequence=self._sequence),
                self._journal_emit(batch, snapshot),
            ],
            group=plan.positions_group,
            positions={**batch.positions, plan.journal: self._journal_start},
        )
        self._sequence += 1
        self._telemetry.observe("transform.commit_s", self._clock_s() - began_s)
        self._telemetry.count("transform.batches")
        self._telemetry.count("transform.records", batch.records)
        self._telemetry.count("transform.outputs", len(batch.emits))
        if snapshot is not None:
            await self._settle_snapshot(snapshot, writer)

    def _journal_emit(self, batch: Batch, snapshot: bytes | None) -> Emit:
        journalled = batch.journalled(
            sequence=self._sequence,
            logic_version=self._plan.logic_version,
            snapshot=snapshot,
            positions={} if snapshot is None else self._positions,
        )
        topic, partition = self._plan.journal
        return emit_of(Output(topic=topic, partition=partition, record=journalled))

    def _is_snapshot_due(self) -> bool:
        settings = self._plan.settings
        return (
            self._sequence + 1 - self._snapshot_sequence >= settings.snapshot_every_batches
            or self._clock_s() - self._snapshot_s >= settings.snapshot_every_s
        )

    async def _settle_snapshot(self, snapshot: bytes, writer: TransactionWriter) -> None:
        """Commit that inputs before the snapshot are not needed; the auditor may delete them."""
        plan = self._plan
        self._snapshot_s, self._snapshot_sequence = self._clock_s(), self._sequence
        await writer.commit(outputs=(), group=plan.needed_group, positions=self._positions)
        self._telemetry.count("transform.snapshots")
        self._telemetry.gauge(
            "transform.snapshot_bytes", len(snapshot), partition=plan.journal.partition
        )

    async def _measure_lag(self, reader: Reader) -> None:
        if not self._telemetry.is_exporting or self._clock_s() - self._lag_s < _LAG_EVERY_S:
            return
        self._lag_s = self._clock_s()
        ends = await self._log.end_positions(self._plan.inputs)
        lag = sum(max(0, end - reader.position(place)) for place, end in ends.items())
        self._telemetry.gauge("transform.lag_records", lag, partition=self._plan.journal.partition)
