"""The auditor goes on without a pause while it has more, and once more when it stops."""

import asyncio
import io
from pathlib import Path

from forgemq_audit.group_index import GROUPS_PER_ROUND_MAX
from forgemq_auditor.rounds import keep_audited
from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Log
from forgemq_contracts.topics import AUDITED_GROUPS
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.auditor.test_group_audit import PARTITIONS, log_with_topics, places_of, write
from tests.unit.run_view.synthetic import SyntheticRun, started

GROUPS = 2 * PARTITIONS * GROUPS_PER_ROUND_MAX


def context_of(log: Log, folder: Path, *, stop: asyncio.Event | None = None) -> Context:
    return Context(
        started=started(),
        log=log,
        blobs=BlobStore(str(folder), run="r"),
        telemetry=Telemetry(service="auditor", stream=io.StringIO()),
        stop=stop or asyncio.Event(),
        environ={},
    )


def cancelled_groups(count: int) -> SyntheticRun:
    run = SyntheticRun()
    for index in range(count):
        run.admit(f"g-{index}", index=index, version=0)
        run.retire(f"g-{index}", reason="cancelled")
    return run


async def audited_when(log: Log, *, count: int) -> set[bytes]:
    """Ids of the audited groups, once there are so many."""
    reader = await log.reader(dict.fromkeys(places_of(AUDITED_GROUPS), 0))
    found: set[bytes] = set()
    async with asyncio.timeout(20):
        while len(found) < count:
            found |= {each.key for each in await reader.read(timeout_s=1, records_max=GROUPS)}
    return found


async def test_a_backlog_of_many_rounds_is_audited_without_waiting_between_them(tmp_path):
    log = await log_with_topics()
    await write(log, cancelled_groups(GROUPS).messages)
    context = context_of(log, tmp_path)
    auditing = asyncio.create_task(keep_audited(context, every_s=3600))
    found = await audited_when(log, count=GROUPS)
    context.stop.set()
    await auditing
    assert found == {f"g-{index}".encode() for index in range(GROUPS)}


async def test_what_retired_last_is_audited_before_the_auditor_ends(tmp_path):
    run = cancelled_groups(3)
    log = await log_with_topics()
    await write(log, run.messages[:-2])
    context = context_of(log, tmp_path)
    auditing = asyncio.create_task(keep_audited(context, every_s=3600))
    assert await audited_when(log, count=2) == {b"g-0", b"g-1"}
    await write(log, run.messages[-2:])
    context.stop.set()
    await auditing
    assert await audited_when(log, count=3) == {b"g-0", b"g-1", b"g-2"}
