"""A task's snapshots in its journal, and from which of them on the journal is needed.

A snapshot is a journal record of its own, without inputs. Two are kept: the newest, and the one
before it. Only when a snapshot was read back from the log, the one two before it is given up. So a
restart that finds the newest one lost or damaged begins with the older one, and handles more
journalled inputs.
"""

from collections.abc import Callable, Mapping

from forgemq_bus.errors import BlobError
from forgemq_bus.log import Log, Place, TransactionWriter
from forgemq_contracts.journal import JournalledBatch, JournalPosition
from forgemq_contracts.messages import Core, Output
from forgemq_shell.batch import digest
from forgemq_shell.journal import read_batch, snapshot_headers
from forgemq_shell.patience import patiently
from forgemq_shell.recall import oldest_named
from forgemq_shell.records import emit_of
from forgemq_shell.restore import KeptSnapshot, Restored
from forgemq_shell.task_plan import TaskPlan
from forgemq_telemetry.telemetry import Telemetry


class Snapshots:
    """When one task writes snapshots, and what of its journal a restart may still need.

    Life: `begin` once the task is restored; then `count_batch` for each commit, and `write` and
    `read_back` when `is_due`.

    Example: snapshots S at the journal's offsets 10, 20 and 30. Once S10 was read back nothing is
    given up; after S20 the journal is needed from 10 on, after S30 from 20 on.
    """

    def __init__(
        self, plan: TaskPlan, *, log: Log, telemetry: Telemetry, clock_s: Callable[[], float]
    ) -> None:
        self._plan = plan
        self._log = log
        self._telemetry = telemetry
        self._clock_s = clock_s
        self._written_s = 0.0
        self._read: KeptSnapshot | None = None
        self._wants_one = False
        self._written_at = 0
        self.batches_since = 0
        self.journal_start = 0

    def begin(self, restored: Restored) -> None:
        """Go on after a restore."""
        self._written_s = self._clock_s()
        self._read = restored.snapshot
        self._wants_one = restored.wants_snapshot
        self.batches_since = restored.batches
        self.journal_start = restored.journal_start

    def count_batch(self) -> None:
        """Note that a batch was committed."""
        self.batches_since += 1

    @property
    def is_due(self) -> bool:
        """Whether a snapshot is to be written now."""
        settings = self._plan.settings
        has_passed = self._clock_s() - self._written_s >= settings.snapshot_every_s
        return (
            self._wants_one
            or self.batches_since >= settings.snapshot_every_batches
            or (has_passed and self.batches_since > 0)
        )

    def batch(
        self, core: Core, *, sequence: int, positions: Mapping[Place, int], run_ms: int
    ) -> JournalledBatch:
        """The journal's record of a snapshot of the core's present state."""
        return JournalledBatch(
            sequence=sequence,
            inputs=(),
            outputs=0,
            outputs_digest=digest(()),
            snapshot=core.snapshot(),
            logic_version=self._plan.snapshots_since or self._plan.logic_version,
            snapshot_logic_version=self._plan.logic_version,
            positions=tuple(
                JournalPosition(topic=place.topic, partition=place.partition, position=position)
                for place, position in sorted(positions.items())
            ),
            needed=oldest_named(core),
            run_ms=run_ms,
        )

    async def write(self, batch: JournalledBatch, writer: TransactionWriter) -> None:
        """Commit the record of a snapshot."""
        plan, journal = self._plan, self._plan.journal
        # Uncommitted: the batch before may lack its marker, and is no part of the stable end yet.
        ends = await self._log.end_positions([journal], isolation="uncommitted")
        self._written_at = ends[journal]
        output = Output(topic=journal.topic, partition=journal.partition, record=batch)
        emit = emit_of(output, headers=snapshot_headers(batch.sequence))
        positions = {journal: self.journal_start}
        await patiently(
            lambda: writer.commit(outputs=[emit], group=plan.positions_group, positions=positions),
            telemetry=self._telemetry,
        )
        self._written_s, self.batches_since, self._wants_one = self._clock_s(), 0, False
        self._telemetry.count("transform.snapshots")
        self._telemetry.gauge(
            "transform.snapshot_bytes", len(batch.snapshot or b""), partition=journal.partition
        )

    async def read_back(self, batch: JournalledBatch, writer: TransactionWriter) -> None:
        """Read the snapshot from the log; if it is there, give up the one before the last.

        The auditor may then delete the journal and the inputs that only that one needs.
        """
        try:
            is_there = await read_batch(self._log, self._plan.journal, self._written_at) == batch
            reason = "" if is_there else "another record is there"
        except BlobError as error:
            reason = str(error)
        if reason:
            self._telemetry.event("snapshot_lost", batch=batch.sequence, error=reason)
            return
        previous = self._read
        self._read = KeptSnapshot.of(batch, position=self._written_at)
        if previous is not None:
            self.journal_start = previous.position
            await writer.commit(
                outputs=(), group=self._plan.needed_group, positions=previous.positions
            )
