"""What must be true after any storm, decided from the log alone.

The journal is read as a list of inputs and given to a fresh core without the shell: no batches, no
snapshots, no crash. What that core writes is what an undisturbed run writes for these inputs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forgemq_bus.log import Emit, Place, Record
from forgemq_bus.memory import MemoryLog
from forgemq_bus.names import broker_place, in_run
from forgemq_contracts import topics
from forgemq_contracts.journal import JournalledBatch
from forgemq_contracts.messages import Core, InvalidRecordError, Message, Output, Tick
from forgemq_shell.dead_letters import dead_letter, letter_of
from forgemq_shell.records import emit_of
from forgemq_shell.task_plan import TaskPlan
from tests.simulation.storm.cluster import StormStore, committed_records

KeyAndValue = tuple[bytes, bytes]
_BATCH = msgspec.msgpack.Decoder(JournalledBatch)


class ViolationError(AssertionError):
    """Something that must be true after any storm is not."""


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """What one core writes over the journal's inputs, and the state it ends with."""

    written: dict[Place, list[KeyAndValue]]
    snapshot: bytes
    inputs: int
    ticks: int
    batches: int
    records_a_batch_max: int


class Oracle:
    """Checks one task's part of the log.

    Args:
        log: Of the run; its store is a `StormStore`.
        run: Id of the run.
        plan: Of the task.
    """

    def __init__(self, log: MemoryLog, *, run: str, plan: TaskPlan) -> None:
        assert isinstance(log._store, StormStore)
        self._store: StormStore = log._store
        self._run = run
        self._plan = plan

    def check(self, core: Core, *, outputs: Sequence[Place]) -> Undisturbed:
        """Check inputs and outputs.

        Args:
            core: Fresh.
            outputs: Every partition that the task may write to.

        Raises:
            ViolationError: says what is wrong.
        """
        batches = self.batches()
        self._check_inputs(batches)
        undisturbed = self._undisturbed(core, batches)
        for place in outputs:
            there = self._written(place)
            expected = undisturbed.written.get(place, [])
            if there != expected:
                raise ViolationError(
                    f"{place.topic}/{place.partition} holds {len(there)} records, an undisturbed "
                    f"run writes {len(expected)}; the first difference is at number "
                    f"{_first_difference(there, expected)}"
                )
        if strangers := set(undisturbed.written) - set(outputs):
            raise ViolationError(f"the core writes to {strangers}")
        return undisturbed

    def batches(self) -> list[JournalledBatch]:
        """The whole journal of the task, also what is trimmed."""
        return [_BATCH.decode(record.value) for record in self._records(self._plan.journal)]

    def unhandled(self) -> dict[Place, tuple[int, int]]:
        """Inputs that are not handled to their end: how far, and the end."""
        handled = dict.fromkeys(self._plan.inputs, 0)
        for item in (item for batch in self.batches() for item in batch.inputs):
            if item.topic:
                handled[Place(item.topic, item.partition)] = item.offset + item.count
        missing: dict[Place, tuple[int, int]] = {}
        for place, position in handled.items():
            entries = self._store.all_entries(broker_place(place, run=self._run))
            if committed_records(entries[position:]):
                missing[place] = (position, len(entries))
        return missing

    def _check_inputs(self, batches: Sequence[JournalledBatch]) -> None:
        """Every record once, in order, and no batch missing; run time never goes back."""
        if (numbers := [batch.sequence for batch in batches]) != list(range(len(batches))):
            raise ViolationError(f"batches are numbered {numbers}")
        handled = dict.fromkeys(self._plan.inputs, 0)
        run_ms = 0
        for item in (item for batch in batches for item in batch.inputs):
            if not item.topic:
                if item.tick_ms < run_ms:
                    raise ViolationError(f"run time goes back from {run_ms} to {item.tick_ms} ms")
                run_ms = item.tick_ms
                continue
            place = Place(item.topic, item.partition)
            skipped = self._records(place, handled[place], item.offset)
            if item.offset < handled[place] or skipped:
                raise ViolationError(
                    f"{place.topic}/{place.partition}: handled up to {handled[place]}, the next "
                    f"range begins at {item.offset}"
                )
            handled[place] = item.offset + item.count
        for place, position in handled.items():
            if self._records(place, position):
                raise ViolationError(
                    f"{place.topic}/{place.partition} was handled up to {position} only"
                )

    def _undisturbed(self, core: Core, batches: Sequence[JournalledBatch]) -> Undisturbed:
        written: dict[Place, list[KeyAndValue]] = defaultdict(list)
        inputs = ticks = records_max = 0
        for batch in batches:
            inputs_before = inputs
            for item in batch.inputs:
                if not item.topic:
                    ticks += 1
                    emits = [emit_of(o) for o in core.handle(Tick(run_ms=item.tick_ms))]
                    _add(written, emits)
                    continue
                place, end = Place(item.topic, item.partition), item.offset + item.count
                for record in self._records(place, item.offset, end):
                    inputs += 1
                    _add(written, _written_for(core, record, service=self._plan.service))
            records_max = max(records_max, inputs - inputs_before)
        return Undisturbed(
            written=dict(written),
            snapshot=core.snapshot(),
            inputs=inputs,
            ticks=ticks,
            batches=len(batches),
            records_a_batch_max=records_max,
        )

    def _written(self, place: Place) -> list[KeyAndValue]:
        """What the task wrote to this partition; other writers may have written to it too."""
        writer = in_run(self._plan.transactional_id, run=self._run)
        return [
            (entry.record.key, entry.record.value)
            for entry in committed_records(
                self._store.all_entries(broker_place(place, run=self._run))
            )
            if entry.record and entry.transaction and entry.transaction.transactional_id == writer
        ]

    def _records(self, place: Place, start: int = 0, end: int | None = None) -> list[Record]:
        entries = self._store.all_entries(broker_place(place, run=self._run))[start:end]
        return [entry.record for entry in committed_records(entries) if entry.record is not None]


def _written_for(core: Core, record: Record, *, service: str) -> list[Emit]:
    try:
        if record.topic in topics.BY_DLQ_NAME:
            decoded: msgspec.Struct = letter_of(record)
        else:
            decoded = topics.decode(topics.BY_NAME[record.topic], record.value)
    except msgspec.ValidationError as error:
        is_ours = topics.BY_NAME[record.topic].dead_letters_by == service
        return [dead_letter(record, f"does not decode: {error}")] if is_ours else []
    message = Message(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        record=decoded,
    )
    try:
        outputs: Sequence[Output] = core.handle(message)
    except InvalidRecordError as error:
        return [dead_letter(record, f"refused: {error}")]
    return [emit_of(output) for output in outputs]


def _add(written: dict[Place, list[KeyAndValue]], emits: Sequence[Emit]) -> None:
    for emit in emits:
        written[emit.place].append((emit.key, emit.value))


def _first_difference(there: Sequence[KeyAndValue], expected: Sequence[KeyAndValue]) -> int:
    pairs = zip(there, expected, strict=False)
    same = min(len(there), len(expected))
    return next((n for n, (left, right) in enumerate(pairs) if left != right), same)
