"""Rewrites the committed recordings that the present code writes otherwise.

`python -m tests.replay.recorded`

For a change that alters outputs or snapshots on purpose. The inputs stay; journal and outputs
become those that the present code writes. Then copy the new digests into test_recordings.py.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from forgemq_bus.log import Emit, Headers, Place
from forgemq_contracts.messages import Output
from forgemq_merger import app as merger
from forgemq_reward import app as reward
from forgemq_scheduler import app as scheduler
from forgemq_shell.batch import Batch, stamped
from forgemq_shell.journal import JournalledInputs, read_journal
from forgemq_shell.recall import oldest_named
from forgemq_shell.recorded_log import RecordedLog
from forgemq_shell.recording import (
    RecordedPartition,
    RecordedRecord,
    Recording,
    read_recording,
    write_recording,
)
from forgemq_shell.records import emit_of
from forgemq_shell.replay_command import TransformOf
from forgemq_shell.transform_settings import TransformSettings

FOLDER = Path(__file__).parent / "recordings"
WHOLE = ("merger-0", "reward-1", "scheduler-0")
"""Recordings that hold every input of their task."""

TRANSFORMS: Mapping[str, TransformOf] = {
    "merger": merger.transform_of,
    "reward": reward.transform_of,
    "scheduler": scheduler.transform_of,
}


async def rewritten(recording: Recording) -> Recording:
    """The recording as the present code would have written it."""
    transform = TRANSFORMS[recording.service](recording.configuration, {})
    number, configuration = recording.partition, recording.configuration
    plan = transform.plan(number, configuration=configuration, settings=TransformSettings())
    log, core = RecordedLog(recording), transform.make_core(number)
    end = (await log.end_positions([plan.journal]))[plan.journal]
    batches = await read_journal(log, plan.journal, start=0, end=end)
    inputs = JournalledInputs(log)
    await inputs.open(batches)
    written: dict[Place, list[Emit]] = defaultdict(list)
    for old in batches:
        batch = Batch(core, service=plan.service)
        for item in old.inputs:
            if not item.topic:
                batch.tick(item.tick_ms)
            for record in await inputs.read(item) if item.topic else ():
                batch.record(record)
        new = msgspec.structs.replace(
            batch.journalled(sequence=old.sequence, logic_version=plan.logic_version),
            snapshot=None if old.snapshot is None else core.snapshot(),
            positions=old.positions,
            run_ms=old.run_ms,
            needed=() if old.snapshot is None else oldest_named(core),
        )
        topic, partition = plan.journal
        journal_emit = emit_of(Output(topic=topic, partition=partition, record=new))
        task = plan.transactional_id
        for emit in (*stamped(batch.emits, task=task, sequence=old.sequence), journal_emit):
            written[emit.place].append(emit)
    parts = {Place(part.topic, part.partition): part for part in recording.partitions}
    parts |= {
        place: _partition(place, emits)
        for place, emits in written.items()
        if _values(parts.get(place)) != [(emit.key, emit.value, emit.headers) for emit in emits]
    }
    return msgspec.structs.replace(recording, partitions=tuple(parts.values()))


def _values(part: RecordedPartition | None) -> list[tuple[bytes, bytes, Headers]]:
    return [] if part is None else [(r.key, r.value, r.headers) for r in part.records]


def _partition(place: Place, emits: list[Emit]) -> RecordedPartition:
    """What was written, two offsets a record: each transaction leaves a marker behind its own."""
    return RecordedPartition(
        topic=place.topic,
        partition=place.partition,
        first=0,
        end=2 * len(emits),
        records=tuple(
            RecordedRecord(
                offset=2 * index,
                timestamp_ms=0,
                key=emit.key,
                value=emit.value,
                headers=emit.headers,
            )
            for index, emit in enumerate(emits)
        ),
    )


if __name__ == "__main__":
    for stem in WHOLE:
        path = FOLDER / f"{stem}.recording"
        old = read_recording(path)
        if (new := asyncio.run(rewritten(old))) != old:
            write_recording(new, path)
