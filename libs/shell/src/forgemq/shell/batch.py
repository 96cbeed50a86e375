"""One batch of a transform task: feeds the core, gathers what is to be written and journalled.

Live handling, restore and replay all go through this class, so they cannot differ.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from forgemq.bus.log import Emit, Headers, Place, Record
from forgemq.contracts import topics
from forgemq.contracts.journal import JournalInput, JournalledBatch
from forgemq.contracts.messages import Core, InvalidRecordError, Message, Output, Tick
from forgemq.shell.records import emit_of

BadRecordHook: TypeAlias = Callable[[Record, str], Sequence[Output]]
"""Pure: (bad record, reason) -> what else to write, e.g. that its group failed."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that went to its dead letter topic."""

    record: Record
    reason: str


class Batch:
    """Inputs handled since the last commit, in order, and everything they caused.

    Args:
        core: Changed by every input.
        on_bad_record: Called for each record that does not decode or that the core refuses.
    """

    def __init__(self, core: Core, *, on_bad_record: BadRecordHook | None = None) -> None:
        self.emits: list[Emit] = []
        self.bad_records: list[BadRecord] = []
        self.records = 0
        self._core = core
        self._on_bad_record = on_bad_record
        self._inputs: list[JournalInput] = []
        self._positions: dict[Place, int] = {}

    @property
    def inputs(self) -> tuple[JournalInput, ...]:
        """What was fed, in order; neighbouring records of a partition as one range."""
        return tuple(self._inputs)

    @property
    def positions(self) -> dict[Place, int]:
        """Next position of every partition that was read."""
        return dict(self._positions)

    def tick(self, run_ms: int) -> None:
        """Let the core know the time."""
        self._inputs.append(JournalInput(tick_ms=run_ms))
        self._write(self._core.handle(Tick(run_ms=run_ms)), ())

    def record(self, record: Record, *, headers: Headers = ()) -> BadRecord | None:
        """Let the core handle a record; its outputs carry `headers`.

        Returns:
            The record and its reason where it was a bad one; its dead letter is in `emits`.
        """
        self._note(record)
        try:
            message = _message(record)
        except msgspec.ValidationError as error:
            return self._bury(record, f"does not decode: {error}", headers)
        try:
            outputs = self._core.handle(message)
        except InvalidRecordError as error:
            return self._bury(record, f"refused: {error}", headers)
        except Exception as error:
            error.add_note(f"while handling {record.topic}/{record.partition}@{record.offset}")
            raise
        self._write(outputs, headers)
        return None

    def journalled(
        self, *, sequence: int, logic_version: int, snapshot: bytes | None
    ) -> JournalledBatch:
        """The journal's record of this batch."""
        return JournalledBatch(
            sequence=sequence,
            inputs=self.inputs,
            outputs=len(self.emits),
            outputs_digest=digest(self.emits),
            snapshot=snapshot,
            logic_version=logic_version,
        )

    def _note(self, record: Record) -> None:
        self.records += 1
        self._positions[record.place] = record.offset + 1
        last = self._inputs[-1] if self._inputs else None
        if last is not None and (last.topic, last.partition) == record.place:
            # Offsets between two records of one partition belong to no record (transaction
            # markers, aborted records), so the range still names exactly what was fed.
            count = record.offset + 1 - last.offset
            self._inputs[-1] = msgspec.structs.replace(last, count=count)
            return
        self._inputs.append(
            JournalInput(
                topic=record.topic, partition=record.partition, offset=record.offset, count=1
            )
        )

    def _write(self, outputs: Sequence[Output], headers: Headers) -> None:
        self.emits.extend(emit_of(output, headers=headers) for output in outputs)

    def _bury(self, record: Record, reason: str, headers: Headers) -> BadRecord:
        self.emits.append(dead_letter(record, reason))
        if self._on_bad_record is not None:
            self._write(self._on_bad_record(record, reason), headers)
        bad = BadRecord(record, reason)
        self.bad_records.append(bad)
        return bad


def dead_letter(record: Record, reason: str) -> Emit:
    """The bad record's original key and bytes, with headers that say where it stood and why."""
    where: Headers = (
        ("reason", reason.encode()),
        ("topic", record.topic.encode()),
        ("partition", str(record.partition).encode()),
        ("offset", str(record.offset).encode()),
    )
    return Emit(
        topic=topics.BY_NAME[record.topic].dlq_name,
        partition=record.partition,
        key=record.key,
        value=record.value,
        headers=record.headers + where,
    )


def digest(emits: Sequence[Emit]) -> str:
    """blake2b over topic, partition, key and value of each record, in order, in hexadecimal."""
    state = hashlib.blake2b(digest_size=16)
    for emit in emits:
        for part in (emit.topic.encode(), str(emit.partition).encode(), emit.key, emit.value):
            state.update(len(part).to_bytes(8, "big"))
            state.update(part)
    return state.hexdigest()


def _message(record: Record) -> Message:
    return Message(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        record=topics.decode(topics.BY_NAME[record.topic], record.value),
    )
