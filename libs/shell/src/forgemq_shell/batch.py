"""One batch of a transform task: feeds the core and collects its outputs and journal record.

Live handling, restore and replay all use this class, so they cannot differ.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forgemq_bus.kept_records import message_of
from forgemq_bus.log import Emit, Headers, Place, Record
from forgemq_contracts import topics
from forgemq_contracts.journal import JournalInput, JournalledBatch, JournalLoss
from forgemq_contracts.messages import Core, InvalidRecordError, Message, Output, Tick
from forgemq_shell.dead_letters import dead_letter, letter_of
from forgemq_shell.records import emit_of

BATCH_HEADER = "batch"
"""Header of every output: the task and the number of its batch, `merger-0/17`."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that does not decode, or that the core refuses.

    Attributes:
        has_dead_letter: This batch writes its dead letter; False: another service does.
    """

    record: Record
    reason: str
    has_dead_letter: bool


class Batch:
    """Inputs handled since the previous commit, in order, and the outputs they caused.

    Args:
        core: Changed by every input.
        service: Owner of the batch. The batch writes dead letters for records that its core
            refuses, and for those that do not decode if the registry gives their topic to it.
    """

    def __init__(self, core: Core, *, service: str) -> None:
        self.emits: list[Emit] = []
        self.records = 0
        self._core = core
        self._service = service
        self._inputs: list[JournalInput] = []
        self._lost: list[JournalLoss] = []
        self._positions: dict[Place, int] = {}

    @property
    def inputs(self) -> tuple[JournalInput, ...]:
        """Inputs in the order they were fed; neighbouring records of a partition are one range."""
        return tuple(self._inputs)

    @property
    def positions(self) -> dict[Place, int]:
        """Next position of every partition that the batch read."""
        return dict(self._positions)

    def tick(self, run_ms: int) -> None:
        """Feed the core a Tick with this run time."""
        self._inputs.append(JournalInput(tick_ms=run_ms))
        self._write(self._core.handle(Tick(run_ms=run_ms)), ())

    def record(self, record: Record, *, headers: Headers = ()) -> BadRecord | None:
        """Feed the core a record; its outputs carry `headers`.

        Returns:
            The record with its reason if it was bad, else None.
        """
        self._note(record)
        if record.lost:
            return self._lose(record, is_late=False)
        try:
            message = _message(record)
        except msgspec.ValidationError as error:
            return self._add_bad(
                record, f"does not decode: {error}", has_dead_letter=self._is_own(record)
            )
        try:
            outputs = self._core.handle(message)
        except InvalidRecordError as error:
            return self._add_bad(record, f"refused: {error}", has_dead_letter=True)
        except Exception as error:
            # A defect of the core may be any error; it ends the process, and says for which record.
            error.add_note(f"while handling {record.where}")
            raise
        self._write(outputs, headers)
        return None

    def lose(self, record: Record) -> BadRecord:
        """Write the dead letter of a record that an earlier batch handled, whose value is lost."""
        return self._lose(record, is_late=True)

    def journalled(self, *, sequence: int, logic_version: int) -> JournalledBatch:
        """The journal's record of this batch."""
        return JournalledBatch(
            sequence=sequence,
            inputs=self.inputs,
            outputs=len(self.emits),
            outputs_digest=digest(self.emits),
            logic_version=logic_version,
            lost=tuple(self._lost),
        )

    def _note(self, record: Record) -> None:
        self.records += 1
        self._positions[record.place] = record.offset + 1
        previous = self._inputs[-1] if self._inputs else None
        if previous is not None and (previous.topic, previous.partition) == record.place:
            # Offsets between two records of one partition belong to no record (transaction
            # markers, aborted records), so the range still names exactly what was fed.
            count = record.offset + 1 - previous.offset
            self._inputs[-1] = msgspec.structs.replace(previous, count=count)
            return
        self._inputs.append(
            JournalInput(
                topic=record.topic, partition=record.partition, offset=record.offset, count=1
            )
        )

    def _write(self, outputs: Sequence[Output], headers: Headers) -> None:
        self.emits.extend(emit_of(output, headers=headers) for output in outputs)

    def _lose(self, record: Record, *, is_late: bool) -> BadRecord:
        loss = JournalLoss(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            key=record.key,
            is_late=is_late,
        )
        self._lost.append(loss)
        return self._add_bad(record, record.lost, has_dead_letter=self._is_own(record))

    def _is_own(self, record: Record) -> bool:
        """Whether this service writes the dead letters of the record's topic."""
        return topics.BY_NAME[record.topic].dead_letters_by == self._service

    def _add_bad(self, record: Record, reason: str, *, has_dead_letter: bool) -> BadRecord:
        if has_dead_letter:
            self.emits.append(dead_letter(record, reason))
        return BadRecord(record, reason, has_dead_letter)


def stamped(emits: Sequence[Emit], *, task: str, sequence: int) -> list[Emit]:
    """The records, each with a header that names the task and the batch."""
    header = (BATCH_HEADER, f"{task}/{sequence}".encode())
    return [msgspec.structs.replace(emit, headers=(*emit.headers, header)) for emit in emits]


def batch_sequence(headers: Headers, *, task: str) -> int | None:
    """Number of the batch that wrote the record with these headers; None if not this task's.

    A dead letter also carries the headers of its bad record, so the last one counts.
    """
    stamps = [value.decode(errors="replace") for name, value in headers if name == BATCH_HEADER]
    writer, _, number = stamps[-1].rpartition("/") if stamps else ("", "", "")
    return int(number) if writer == task and number.isdecimal() else None


def digest(emits: Sequence[Emit]) -> str:
    """blake2b over topic, partition, key and value of each record, in order, in hexadecimal."""
    state = hashlib.blake2b(digest_size=16)
    for emit in emits:
        for part in (emit.topic.encode(), str(emit.partition).encode(), emit.key, emit.value):
            state.update(len(part).to_bytes(8, "big"))
            state.update(part)
    return state.hexdigest()


def _message(record: Record) -> Message:
    if record.topic not in topics.BY_DLQ_NAME:
        return message_of(record)
    return Message(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        record=letter_of(record),
    )
