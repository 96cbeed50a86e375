"""Of several auditors of a run one works; another takes over when it goes."""

import asyncio
import io
import json
from pathlib import Path

import pytest

from forgemq_auditor.active import Work, run_while_active
from forgemq_bus.blobs import BlobStore
from forgemq_bus.memory import MemoryLog
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.auditor.test_group_audit import log_with_topics
from tests.unit.run_view.synthetic import started


class Process:
    """An auditor process whose work is to stand in `working`, until it stops or is cancelled."""

    def __init__(
        self,
        name: str,
        log: MemoryLog,
        working: list[str],
        folder: Path,
        *,
        work: Work | None = None,
    ) -> None:
        self.name = name
        self.working = working
        self.lines = io.StringIO()
        self.context = Context(
            started=started(),
            log=log.open(),
            blobs=BlobStore(str(folder), run="r"),
            telemetry=Telemetry(service="auditor", stream=self.lines),
            stop=asyncio.Event(),
            environ={},
        )
        self.task = asyncio.create_task(run_while_active(self.context, work or self.work))

    async def work(self) -> None:
        self.working.append(self.name)
        try:
            await self.context.stop.wait()
        finally:
            self.working.remove(self.name)

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.lines.getvalue().splitlines()]

    async def stop(self) -> None:
        self.context.stop.set()
        await self.task


async def until(working: list[str], wanted: list[str]) -> None:
    async with asyncio.timeout(10):
        while working != wanted:  # noqa: ASYNC110 - two processes change the list
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_one_works_and_another_takes_over_when_it_stops(tmp_path: Path):
    log, working = await log_with_topics(), []
    first = Process("first", log, working, tmp_path)
    await until(working, ["first"])
    second = Process("second", log, working, tmp_path)
    await asyncio.sleep(0.5)
    assert len(working) == 1
    active, other = (first, second) if working == ["first"] else (second, first)
    await active.stop()
    await until(working, [other.name])
    assert other.events()[-1] == "active"
    await other.stop()
    assert working == []


async def test_work_that_fails_ends_the_process_with_its_error(tmp_path: Path):
    log = await log_with_topics()

    async def fail() -> None:
        raise ZeroDivisionError

    process = Process("first", log, [], tmp_path, work=fail)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(process.task, 10)
    assert raised.group_contains(ZeroDivisionError)
