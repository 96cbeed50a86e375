"""Auditors as their own processes on a real broker, without a console."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from forgemq_audit import run_report
from forgemq_auditor.blob_sweep import places_of_run
from forgemq_bus.blobs import BlobStore, blob_name
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kept_records import read_from
from forgemq_bus.log import Place
from forgemq_bus.payloads import reference_of
from forgemq_contracts.audit import AuditedGroup
from forgemq_contracts.topics import (
    AUDITED_GROUPS,
    FINISHED_COMPLETIONS,
    MERGED_TREES,
    decode,
    needed_group,
)
from forgemq_launcher.records.run_topics import create_topics, write_start
from tests.integration.synthetic_log import write
from tests.unit.run_view.synthetic import SyntheticRun, started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
BULK = [Place(t.name, n) for t in (FINISHED_COMPLETIONS, MERGED_TREES) for n in range(2)]
GRACE_S = 3
MINUTE_S = 60


@dataclass
class Run:
    """A run that is written by the test, and its auditors."""

    bootstrap: str
    run_id: str
    folder: Path

    async def open(self) -> "Run":
        connection = KafkaConnection(bootstrap=self.bootstrap)
        self.started = msgspec.structs.replace(
            started(run=self.run_id), blobs=str(self.folder / "blobs")
        )
        self.blobs = BlobStore(self.started.blobs, run=self.run_id)
        # Completions above 300 bytes lie in the blob store, as those of long contexts do.
        self.log = KafkaLog(connection, run=self.run_id, blobs=self.blobs, inline_bytes_max=300)
        await create_topics(self.log, self.started.configuration)
        await write_start(connection, self.started)
        return self

    async def start_auditor(self) -> Process:
        environ = {
            **os.environ,
            "FORGEMQ_RUN": self.run_id,
            "FORGEMQ_KAFKA": self.bootstrap,
            "FORGEMQ_AUDITOR_AUDIT_EVERY_S": "0.2",
            "FORGEMQ_AUDITOR_TRIM_EVERY_S": "0.2",
            "FORGEMQ_AUDITOR_SWEEP_EVERY_S": "0.5",
            "FORGEMQ_AUDITOR_SWEEP_GRACE_S": str(GRACE_S),
        }
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "forgemq_auditor", env=environ
        )

    async def need_nothing(self) -> None:
        """Commit for every other reader of the bulk topics that it needs no record of now."""
        ends = await self.log.end_positions(BULK)
        groups = {*FINISHED_COMPLETIONS.needed_by, *MERGED_TREES.needed_by}
        for group in groups - {needed_group("auditor")}:
            writer = await self.log.transaction_writer(f"test-{group}")
            await writer.commit(outputs=(), group=group, positions=ends)
            await writer.close()

    async def audited(self) -> dict[str, int]:
        """Samples in the tree of each audited group."""
        found: dict[str, int] = {}
        reader = await self.log.reader({Place(AUDITED_GROUPS.name, n): 0 for n in range(2)})
        while records := await reader.read(timeout_s=1, records_max=100):
            for record in records:
                group = decode(AUDITED_GROUPS, record.value)
                assert isinstance(group, AuditedGroup)
                assert group.group_id not in found, "audited twice"
                found[group.group_id] = sum(len(each.completion_ids) for each in group.trees)
        await reader.close()
        return found

    async def stored(self) -> int:
        """Number of blobs of the run."""
        minutes = await self.blobs.list_minutes()
        return sum([len(await self.blobs.list_blobs(minute)) for minute in minutes])


async def until(holds: Callable[[], Awaitable[bool]], *, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.5)


async def test_blobs_of_trimmed_records_vanish_and_the_audit_still_holds(
    kafka_bootstrap, new_run_id, tmp_path
):
    """The first auditor is killed halfway; the one that stood by goes on."""
    run = await Run(kafka_bootstrap, new_run_id(), tmp_path).open()
    records = SyntheticRun(run=run.run_id).play(steps=2)
    first = await run.start_auditor()
    processes = [first]
    try:
        await write(run.log, records, first=0)
        written_s = time.monotonic()
        assert await run.stored() > len(list(records.of(FINISHED_COMPLETIONS)))

        async def all_audited() -> bool:
            return len(await run.audited()) == 4

        await until(all_audited, timeout_s=60)
        second = await run.start_auditor()
        processes.append(second)
        await asyncio.sleep(3)
        first.send_signal(signal.SIGKILL)
        await run.need_nothing()

        async def all_trimmed() -> bool:
            return await run.log.first_positions(BULK) == await run.log.end_positions(BULK)

        await until(all_trimmed, timeout_s=60)
        left_s = written_s + MINUTE_S + GRACE_S - time.monotonic()
        # Records of other topics keep their blobs: those of the trees and completions go.
        kept = await blobs_of_other_topics(run)

        async def all_swept() -> bool:
            return await run.stored() == kept

        await until(all_swept, timeout_s=max(0.0, left_s) + 60)
        assert await run.audited() == {f"g-{number}": 4 for number in range(4)}
        result, _ = await run_report.audit_run(
            run.log, run.started, reason="completed", now_ms=2**41
        )
        assert result.guarantees == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
        second.terminate()
        assert await second.wait() == 0
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
        await run.log.close()


async def blobs_of_other_topics(run: Run) -> int:
    """Number of blobs that records outside the bulk topics point at."""

    places = [place for place in places_of_run(run.started.configuration) if place not in BULK]
    found: set[str] = set()
    starts = await run.log.first_positions(places)
    async for records in read_from(run.log, starts, has_values=False):
        found |= {blob_name(r) for r in map(reference_of, records) if r is not None}
    return len(found)
