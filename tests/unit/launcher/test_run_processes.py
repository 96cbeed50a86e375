"""What the launcher holds for a run's processes before it starts them."""

import asyncio
from pathlib import Path

import pytest

from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.run_setup import RunSetup
from forgemq_launcher.settings import LauncherSettings
from forgemq_launcher.upkeep.machine import MachineError
from forgemq_launcher.upkeep.run_processes import RunProcesses
from forgemq_settings.ports import free_port
from tests.small_run import small_run

NAMED = {"FORGEMQ_KAFKA": "127.0.0.1:1", "FORGEMQ_ENGINE_URL": "http://127.0.0.1:1"}


async def planned(folder: Path, *, console_port: int) -> RunProcesses:
    """The processes of a new run whose services are planned and not started."""
    run = RunFolder(folder)
    run.make(small_run(group_partitions=1))
    settings = LauncherSettings(memory_min_bytes_without_engine=0, console_port=console_port)
    setup = RunSetup(
        folder=run, configuration=run.configuration(), settings=settings, environ=NAMED
    )
    processes = RunProcesses(setup, note=lambda _: None)
    try:
        processes.start_engines()
        assert await processes.start_broker(stop=asyncio.Event())
        assert processes.plan_services().console_port == console_port
    except BaseException:
        await processes.stop()
        raise
    return processes


async def test_a_page_that_is_planned_has_its_port_until_the_run_stops(tmp_path: Path) -> None:
    port = free_port()
    first = await planned(tmp_path / "first", console_port=port)
    with pytest.raises(MachineError, match=f"port {port} of .* is taken"):
        await planned(tmp_path / "second", console_port=port)
    await first.stop()
    third = await planned(tmp_path / "third", console_port=port)
    await third.stop()
