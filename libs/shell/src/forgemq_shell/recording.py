"""A recording: one task's journal, inputs and outputs in a file, to be replayed without a broker.

`record_task` copies them from a run's log, so that an incident can be attached to a report and kept
as a test. The file is gzipped MessagePack of a `Recording`. It holds the content of the task's
records and the run's configuration; settings, and so keys and passwords, are not in it.
"""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.log import Headers, LogReads, Place, Record
from forgemq_contracts.run import RunConfiguration
from forgemq_shell.batch import batch_sequence
from forgemq_shell.journal import input_starts, read_journal
from forgemq_shell.recall import recalled_starts
from forgemq_shell.restored_positions import handled_positions
from forgemq_shell.task_plan import TaskPlan

RECORDING_BYTES_MAX = 256 * 2**20
"""Of values, before compression: a recording is held in memory as a whole, by both sides."""


class RecordingError(Exception):
    """A file is not a recording, or a task has too much for one."""


class RecordedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record as it was read from the log."""

    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes
    headers: Headers


class RecordedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded part of one partition.

    Attributes:
        first: Offset of the oldest record that is there; older ones were not needed or not kept.
        end: Offset behind the newest one.
    """

    topic: str
    partition: int
    first: int
    end: int
    records: tuple[RecordedRecord, ...]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a run: its partition `partition` of the journal of `service`."""

    service: str
    partition: int
    configuration: RunConfiguration
    partitions: tuple[RecordedPartition, ...]


def write_recording(recording: Recording, path: Path) -> None:
    """Write the recording to a file, and make its folder; equal recordings give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(msgspec.msgpack.encode(recording), mtime=0))


def read_recording(path: Path) -> Recording:
    """Read the recording in a file.

    Raises:
        RecordingError: there is no such file, or it is not a recording.
    """
    try:
        return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=Recording)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: cannot be read as a recording: {error}") from error


async def record_task(
    log: LogReads,
    plan: TaskPlan,
    *,
    configuration: RunConfiguration,
    outputs: Sequence[Place],
    bytes_max: int = RECORDING_BYTES_MAX,
) -> Recording:
    """Copy what a replay of this task reads: its journal, the inputs it names, its outputs.

    Args:
        log: The run's log; the run may be up.
        plan: Of the task.
        configuration: Of the run.
        outputs: Every partition that the task may write to, except its journal.
        bytes_max: Of all values together.

    Raises:
        RecordingError: the task has more.
        JournalError: a batch is missing.
    """
    copy = _Copy(log, bytes_max=bytes_max)
    first = (await log.first_positions([plan.journal]))[plan.journal]
    end = (await log.end_positions([plan.journal]))[plan.journal]
    batches = await read_journal(log, plan.journal, start=first, end=end)
    partitions = [await copy.partition(plan.journal, first, end)]
    starts, ends = input_starts(batches), handled_positions(batches)
    for place, start in recalled_starts(batches).items():
        starts[place] = min(start, starts.get(place, start))
    kept = await log.first_positions(list(starts))
    for place, start in starts.items():
        # The first one that is left tells the replay what was trimmed away.
        start_kept = min(max(start, kept[place]), ends[place])
        partitions.append(await copy.partition(place, start_kept, ends[place]))
    # Open transactions count: what the journal names may still lack its marker in one partition.
    output_ends = await log.end_positions(outputs, isolation="uncommitted")
    for place, start in (await log.first_positions(outputs)).items():
        task = plan.transactional_id
        partitions.append(await copy.partition(place, start, output_ends[place], task=task))
    return Recording(
        service=plan.service,
        partition=plan.journal.partition,
        configuration=configuration,
        partitions=tuple(part for part in partitions if part.end),
    )


class _Copy:
    """Copies partitions and counts their bytes."""

    def __init__(self, log: LogReads, *, bytes_max: int) -> None:
        self._log = log
        self._bytes_max = bytes_max
        self._bytes = 0

    async def partition(
        self, place: Place, first: int, end: int, *, task: str | None = None
    ) -> RecordedPartition:
        """Records in [first, end); with a task, only those that it wrote."""
        found: list[Record] = []
        reader = await self._log.reader({place: first})
        try:
            async for records in read_up_to(reader, {place: end}):
                new = [record for record in records if record.offset < end]
                if task is not None:
                    new = [r for r in new if batch_sequence(r.headers, task=task) is not None]
                found += new
                self._bytes += sum(len(record.value) for record in new)
                if self._bytes > self._bytes_max:
                    raise RecordingError(
                        f"the task has more than {self._bytes_max} bytes of records"
                    )
        finally:
            await reader.close()
        return RecordedPartition(
            topic=place.topic,
            partition=place.partition,
            first=first,
            end=end,
            records=tuple(
                RecordedRecord(
                    offset=record.offset,
                    timestamp_ms=record.timestamp_ms,
                    key=record.key,
                    value=record.value,
                    headers=record.headers,
                )
                for record in found
            ),
        )
