"""Freezes what the cores' snapshots look like: `python -m tests.contracts.frozen_snapshots`.

For each service `snapshots/<service>-<logic version>.json`, the schema of its snapshot, and
`.msgpack`, the state of a recorded run at its largest. A build must read the snapshots of every
older one, so files of a released build are never written again; until there is a release, a change
of the structs may write them again.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from forgemq_bus.log import Place
from forgemq_contracts.compatibility import schemas_of
from forgemq_contracts.messages import Core
from forgemq_merger.core.merger import MergerState
from forgemq_reward.core.groups import RewardSnapshot
from forgemq_scheduler.core.snapshot import SchedulerSnapshot
from forgemq_shell.batch import Batch
from forgemq_shell.journal import JournalledInputs, read_journal
from forgemq_shell.recorded_log import RecordedLog
from forgemq_shell.recording import Recording, read_recording
from forgemq_shell.transform import Transform
from tests.replay.recorded import FOLDER as RECORDINGS
from tests.replay.recorded import TRANSFORMS, WHOLE

FOLDER = Path(__file__).parent / "snapshots"
SNAPSHOTS: Mapping[str, type[Struct]] = {
    "merger": MergerState,
    "reward": RewardSnapshot,
    "scheduler": SchedulerSnapshot,
}


def schema_of(service: str) -> dict[str, dict[str, Any]]:
    """JSON Schema of the service's snapshot and of every struct in it, by name."""
    return schemas_of([SNAPSHOTS[service]])


def recording_of(service: str) -> Recording:
    """The recorded run of the service."""
    (stem,) = [stem for stem in WHOLE if stem.startswith(f"{service}-")]
    return read_recording(RECORDINGS / f"{stem}.recording")


def transform_of(service: str) -> Transform:
    """The wiring of the service for its recorded run."""
    return TRANSFORMS[service](recording_of(service).configuration, {})


def fresh_core(service: str) -> Core:
    """The core of the recorded task."""
    return transform_of(service).make_core(recording_of(service).partition)


async def largest_snapshot(service: str) -> bytes:
    """The longest snapshot behind any batch of the recorded run."""
    recording, core, largest = recording_of(service), fresh_core(service), b""
    log = RecordedLog(recording)
    journal = Place(f"{service}-journal-v1", recording.partition)
    end = (await log.end_positions([journal]))[journal]
    batches = await read_journal(log, journal, start=0, end=end)
    inputs = JournalledInputs(log)
    await inputs.open(batches)
    for old in batches:
        batch = Batch(core, service=service)
        for item in old.inputs:
            if not item.topic:
                batch.tick(item.tick_ms)
                continue
            for record in await inputs.read(item):
                batch.record(record)
        largest = max(largest, core.snapshot(), key=len)
    return largest


def freeze(service: str, folder: Path) -> None:
    """Write schema and bytes of the service's present logic version."""
    stem = folder / f"{service}-{transform_of(service).logic_version}"
    text = json.dumps(schema_of(service), indent=1, ensure_ascii=True) + "\n"
    stem.with_suffix(".json").write_text(text, encoding="utf-8")
    stem.with_suffix(".msgpack").write_bytes(asyncio.run(largest_snapshot(service)))


if __name__ == "__main__":
    for name in SNAPSHOTS:
        freeze(name, FOLDER)
