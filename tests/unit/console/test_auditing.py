"""The console audits a backlog in rounds, one right after the other."""

import asyncio
import io

from forgemq_bus.blobs import BlobStore
from forgemq_console.auditing import keep_audited
from forgemq_contracts.topics import AUDITED_GROUPS
from forgemq_run_view.group_records import GROUPS_PER_ROUND_MAX
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.run_view.synthetic import SyntheticRun, started
from tests.unit.run_view.test_auditing import PARTITIONS, log_with_topics, places_of, write

GROUPS = 2 * PARTITIONS * GROUPS_PER_ROUND_MAX


async def test_a_backlog_of_many_rounds_is_audited_without_waiting_between_them(tmp_path):
    run = SyntheticRun()
    for index in range(GROUPS):
        run.admit(f"g-{index}", index=index, version=0)
        run.retire(f"g-{index}", reason="cancelled")
    log = await log_with_topics()
    await write(log, run.messages)
    context = Context(
        started=started(),
        log=log,
        blobs=BlobStore(str(tmp_path)),
        telemetry=Telemetry(service="console", stream=io.StringIO()),
        stop=asyncio.Event(),
        environ={},
    )
    auditing = asyncio.create_task(keep_audited(context, every_s=3600))
    reader = await log.reader(dict.fromkeys(places_of(AUDITED_GROUPS), 0))
    found: set[bytes] = set()
    async with asyncio.timeout(20):
        while len(found) < GROUPS:
            found |= {each.key for each in await reader.read(timeout_s=1, records_max=GROUPS)}
    context.stop.set()
    await auditing
    assert found == {f"g-{index}".encode() for index in range(GROUPS)}
