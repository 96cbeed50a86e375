"""Compares what a task's replay writes with the log, up to the first difference."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import zip_longest

from forgemq_bus.log import Emit, LogReads, Place, Record
from forgemq_contracts.messages import Core
from forgemq_shell.replay import ReplayedBatch, replay_task
from forgemq_shell.task_plan import TaskPlan
from forgemq_shell.written_outputs import WrittenBatch, WrittenOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference between a replay and the log.

    Attributes:
        sequence: Number of the batch in the journal.
        place: Partition of the record that differs; None if all records that are kept are the
            same, but the state or the digest in the journal is not.
        written: The record on the log; None if it has no such record.
        replayed: What the core writes; None if it writes no such record.
        detail: What differs, if it is not a record.
    """

    sequence: int
    place: Place | None = None
    written: Record | None = None
    replayed: Emit | None = None
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One task's replay compared with the log, up to the first difference.

    Attributes:
        batches: Number of batches replayed, from `batch_first` to `batch_last`.
        outputs: Number of records that the core wrote in the replay.
        outputs_trimmed: How many of them the log does not have any more: only the journal's digest,
            which covers them, could be compared.
        logic_left_out: As of `ReplayedBatch`.
    """

    journal: Place
    batches: int = 0
    batch_first: int = 0
    batch_last: int = 0
    inputs: int = 0
    ticks: int = 0
    outputs: int = 0
    outputs_trimmed: int = 0
    logic_left_out: int = 0
    difference: Difference | None = None

    def add(self, replayed: ReplayedBatch, written: Mapping[Place, WrittenBatch]) -> None:
        """Compare this batch and count it."""
        batch = replayed.batch
        if not self.batches:
            self.batch_first = batch.sequence
            self.logic_left_out = replayed.logic_left_out
        self.batches += 1
        self.batch_last = batch.sequence
        self.ticks += sum(1 for item in batch.inputs if not item.topic)
        self.inputs += replayed.records
        self.outputs += len(replayed.emits)
        self.difference = (
            _lost_input(replayed)
            or self._record_difference(replayed, written)
            or _state_difference(replayed)
        )

    def _record_difference(
        self, replayed: ReplayedBatch, written: Mapping[Place, WrittenBatch]
    ) -> Difference | None:
        emits: dict[Place, list[Emit]] = defaultdict(list)
        for emit in replayed.emits:
            emits[emit.place].append(emit)
        for place in (*emits, *(place for place in written if place not in emits)):
            there = written.get(place, _NOTHING)
            again: Sequence[Emit] = emits.get(place, ())
            if there.is_partial and len(again) > len(there.records):
                gone = len(again) - len(there.records)
                self.outputs_trimmed += gone
                again = again[gone:]
            for record, emit in zip_longest(there.records, again):
                if record is None or emit is None or not _is_same(record, emit):
                    return Difference(
                        sequence=replayed.batch.sequence, place=place, written=record, replayed=emit
                    )
        return None


_NOTHING = WrittenBatch(records=(), is_partial=False)


def _is_same(record: Record, emit: Emit) -> bool:
    return (record.key, record.value) == (emit.key, emit.value)


def _lost_input(replayed: ReplayedBatch) -> Difference | None:
    """The first input that the replay cannot read and the task could."""
    if not replayed.lost:
        return None
    record = replayed.lost[0]
    detail = f"input {record.where}: {record.lost}"
    return Difference(sequence=replayed.batch.sequence, detail=detail)


def _state_difference(replayed: ReplayedBatch) -> Difference | None:
    """The difference in digest or snapshot, if all records that are kept are the same."""
    batch = replayed.batch
    if replayed.digest != batch.outputs_digest:
        detail = (
            f"the journal says {batch.outputs} records with digest {batch.outputs_digest}, "
            f"the replay writes {len(replayed.emits)} with {replayed.digest}"
        )
        return Difference(sequence=batch.sequence, detail=detail)
    if replayed.snapshot != batch.snapshot:
        detail = "the state after it is not the snapshot in the journal"
        return Difference(sequence=batch.sequence, detail=detail)
    return None


async def compare(
    log: LogReads, plan: TaskPlan, core: Core, *, outputs: Sequence[Place]
) -> Comparison:
    """Replay all that is kept of a task's journal, up to the first difference; writes nothing.

    Args:
        log: Of the run, which may be up, or of a recording.
        plan: Of the task.
        core: Fresh, made as the service makes it for this partition.
        outputs: Every partition that the task may write to, its journal left out.

    Raises:
        JournalError: see `replay_task`.
    """
    result = Comparison(journal=plan.journal)
    written = WrittenOutputs(log, task=plan.transactional_id)
    again = replay_task(
        log, plan.journal, core, service=plan.service, logic_version=plan.logic_version
    )
    try:
        async with aclosing(again):
            async for replayed in again:
                if not result.batches:
                    # Not earlier: the replay took the journal's end before it gave its first
                    # batch, so all outputs that the journal names are written.
                    await written.open(outputs)
                result.add(replayed, await written.read_batch(replayed.batch.sequence))
                if result.difference is not None:
                    break
    finally:
        await written.close()
    return result
