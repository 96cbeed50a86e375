"""Rebuilds a task's state from its journal: after a stop, a crash, or a change of its core.

The newest snapshot that can be read is loaded, then the journalled inputs after it are handled
again. What the core writes meanwhile is dropped: it stands on the log.

- Batches of this core's logic version must give the same bytes, or the task does not start.
- Batches of an older one are taken over. What the old core wrote for them stays; this core handles
  their inputs for its state alone. So no output is written twice, and none is added for old inputs.
- A snapshot says which logic version can go on from it at least. So an older build goes on behind
  the clean stop of a newer one, if that is able to; batches of a newer core it refuses.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forgemq_bus.errors import LostBlobError
from forgemq_bus.log import Log, Place, Record
from forgemq_contracts.journal import JournalledBatch, writer_logic
from forgemq_contracts.messages import Core
from forgemq_shell.journal import (
    JournalEntry,
    JournalError,
    JournalledInputs,
    read_batch,
    read_entries,
)
from forgemq_shell.recall import positions_needed, recall
from forgemq_shell.replay import ReplayedBatch, begin, replay
from forgemq_shell.restored_positions import restored_positions
from forgemq_shell.task_plan import TaskPlan
from forgemq_telemetry.telemetry import Telemetry


class DivergedError(Exception):
    """The core's replay differs from what its journal says it wrote, at the same logic version.

    Either the core is not deterministic, or its code or the run's configuration changed after the
    journal was written. The task writes nothing. Code that writes other bytes on purpose has a
    higher logic version (CONTRIBUTING.md, "Change a core").
    """


class NewerLogicError(Exception):
    """The journal was written by a newer core; this build cannot go on with its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSnapshot:
    """A snapshot that was read from the log.

    Attributes:
        position: Where reading the journal begins with it.
        positions: Of the inputs after it.
    """

    position: int
    positions: Mapping[Place, int]

    @classmethod
    def of(cls, batch: JournalledBatch, *, position: int) -> "KeptSnapshot":
        """The snapshot in this batch of the journal, which lies at `position`."""
        return cls(position=position, positions=positions_needed(batch))


@dataclass(slots=True, kw_only=True)
class TakenOver:
    """Batches of an older core that this one handled again.

    Attributes:
        batches: How many.
        different: How many of them this core would have written otherwise.
        first_different: Number of the first of these; -1: there is none.
        outputs_written: What the old core wrote for them.
        outputs_dropped: What this core would have written.
    """

    batches: int = 0
    different: int = 0
    first_different: int = -1
    outputs_written: int = 0
    outputs_dropped: int = 0

    def add(self, replayed: ReplayedBatch) -> None:
        """Count one batch."""
        batch = replayed.batch
        self.batches += 1
        self.outputs_written += batch.outputs
        self.outputs_dropped += len(replayed.emits)
        if replayed.digest != batch.outputs_digest:
            self.different += 1
            if self.first_different < 0:
                self.first_different = batch.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Where a restored task goes on.

    Attributes:
        positions: Of the next record of each input.
        journal_start: Where the part of the journal begins that a restart may need.
        sequence: Number of the next batch.
        run_ms: Run time of the last tick.
        snapshot: The one that the state was built from; None: from the first batch.
        batches: Number of batches handled after it.
        wants_snapshot: The newest one is lost or of an older core: write one before anything else.
        lost: Inputs that were handled after the snapshot, whose values are lost since and which
            have no dead letter yet.
    """

    positions: dict[Place, int]
    journal_start: int
    sequence: int
    run_ms: int
    snapshot: KeptSnapshot | None
    batches: int
    wants_snapshot: bool
    lost: Sequence[Record]


@dataclass(slots=True, kw_only=True)
class _Losses:
    """Inputs that a replay has to do without although the task had them."""

    has_any: bool = False
    unwritten: dict[tuple[Place, int], Record] = field(default_factory=dict)

    def begin(self, lost: Sequence[Record]) -> None:
        """Count what the snapshot names."""
        self.has_any = bool(lost)
        self.unwritten = {(record.place, record.offset): record for record in lost}

    def add(self, replayed: ReplayedBatch) -> None:
        """Count the losses of one batch, and the dead letters that it wrote of earlier ones."""
        for record in replayed.lost:
            self.has_any = True
            self.unwritten[record.place, record.offset] = record
        for loss in replayed.batch.lost:
            self.unwritten.pop((Place(loss.topic, loss.partition), loss.offset), None)


@dataclass(slots=True, kw_only=True)
class _Chain:
    """What rebuilds the state: a snapshot and every batch after it, or all batches."""

    batches: list[JournalledBatch] = field(default_factory=list)
    position: int = 0
    snapshots_lost: int = 0


async def restore(plan: TaskPlan, *, log: Log, core: Core, telemetry: Telemetry) -> Restored:
    """Bring a fresh core to the state after the last journalled batch; write nothing.

    Raises:
        JournalError: the state cannot be rebuilt.
        DivergedError: the replay differs from the journal.
        NewerLogicError: the journal is that of a newer core.
    """
    places = (plan.journal, *plan.inputs)
    committed = await log.committed(group=plan.positions_group, places=places)
    # Asked for last: what is not committed is not trimmed, so these are still the first ones.
    first = await log.first_positions(places)
    journal_start = committed.get(plan.journal, first[plan.journal])
    end = (await log.end_positions([plan.journal]))[plan.journal]
    entries = await read_entries(log, plan.journal, start=journal_start, end=end)
    chain = await _chain(entries, plan=plan, log=log, telemetry=telemetry)
    batches = chain.batches
    _check_logic(plan, batches)
    positions = restored_positions(plan.inputs, batches=batches, committed=committed, first=first)
    lost = await _replay(plan, batches, log=log, core=core, telemetry=telemetry)
    has_snapshot = bool(batches) and batches[0].snapshot is not None
    return Restored(
        positions=positions,
        journal_start=journal_start,
        sequence=entries[-1].sequence + 1 if entries else 0,
        run_ms=_run_ms(batches),
        snapshot=KeptSnapshot.of(batches[0], position=chain.position) if has_snapshot else None,
        batches=len(batches) - has_snapshot,
        wants_snapshot=chain.snapshots_lost > 0
        or any(writer_logic(batch) != plan.logic_version for batch in batches),
        lost=lost,
    )


async def _chain(
    entries: Sequence[JournalEntry], *, plan: TaskPlan, log: Log, telemetry: Telemetry
) -> _Chain:
    chain = _Chain()
    for entry in reversed(entries):
        batch = entry.batch
        if batch is None:
            try:
                batch = await read_batch(log, plan.journal, entry.position)
            except LostBlobError as error:
                chain.snapshots_lost += 1
                telemetry.event("snapshot_lost", batch=entry.sequence, error=str(error))
                continue  # It holds no input, and an older snapshot is kept.
        chain.batches.insert(0, batch)
        if batch.snapshot is not None:
            chain.position = entry.position
            return chain
    if chain.snapshots_lost and entries[0].sequence:
        raise JournalError(
            f"{plan.journal}: {chain.snapshots_lost} snapshots of the journal are lost, and no "
            f"other is kept"
        )
    return chain


def _check_logic(plan: TaskPlan, batches: Sequence[JournalledBatch]) -> None:
    newest = max((batch.logic_version for batch in batches), default=plan.logic_version)
    if newest > plan.logic_version:
        raise NewerLogicError(
            f"{plan.transactional_id}: the journal was written by logic version {newest} of "
            f"{plan.service}, this build has {plan.logic_version}: go on with a build that has "
            f"{newest} or more"
        )


async def _replay(
    plan: TaskPlan,
    batches: Sequence[JournalledBatch],
    *,
    log: Log,
    core: Core,
    telemetry: Telemetry,
) -> Sequence[Record]:
    """Handle the batches again; returns inputs whose values are lost and that have no letter."""
    left = begin(core, batches)
    lost = await recall(core, log)
    inputs = JournalledInputs(log, clock_s=asyncio.get_running_loop().time)
    taken_over, losses = TakenOver(), _Losses()
    losses.begin(lost)
    try:
        await inputs.open(left)
        async for replayed in replay(core, left, inputs=inputs, service=plan.service):
            losses.add(replayed)
            if replayed.batch.logic_version != plan.logic_version:
                taken_over.add(replayed)
            elif not replayed.is_same and not losses.has_any:
                raise _diverged(plan, replayed)
    finally:
        await inputs.close()
    others = {writer_logic(batch) for batch in batches} - {plan.logic_version}
    if others:
        telemetry.event(
            "taken_over",
            partition=plan.journal.partition,
            logic_version=plan.logic_version,
            logic_version_before=min(others),
            batches=taken_over.batches,
            different=taken_over.different,
            first_different=taken_over.first_different,
            outputs_written=taken_over.outputs_written,
            outputs_dropped=taken_over.outputs_dropped,
        )
    return tuple(losses.unwritten.values())


def _diverged(plan: TaskPlan, replayed: ReplayedBatch) -> DivergedError:
    batch = replayed.batch
    return DivergedError(
        f"{plan.transactional_id}: batch {batch.sequence} wrote {batch.outputs} records with "
        f"digest {batch.outputs_digest}, its replay {len(replayed.emits)} with {replayed.digest}"
    )


def _run_ms(batches: Sequence[JournalledBatch]) -> int:
    ticks = [item.tick_ms for batch in batches for item in batch.inputs if not item.topic]
    return max([*ticks, *(batch.run_ms for batch in batches)], default=0)
