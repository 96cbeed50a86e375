"""How a run ends if its disk is full or its terminal is gone."""

import asyncio
import io
import os
import pty
import resource
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.requested_end import RequestedEnd
from forgemq_launcher.commands.watching import show_until_ended
from forgemq_launcher.display.curves import CurveWriter
from forgemq_launcher.display.panel import PanelView, ShownService, panel
from forgemq_launcher.display.run_display import RunDisplay
from forgemq_launcher.display.screen import Screen
from forgemq_launcher.outcome import Outcome, watch_run
from forgemq_launcher.records.follower import Follower
from forgemq_launcher.records.run_end import request_end
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.run_setup import RunSetup
from forgemq_launcher.settings import LauncherSettings
from forgemq_launcher.upkeep.run_processes import RunProcesses
from forgemq_launcher.upkeep.stop_signal import StopSignal
from forgemq_telemetry.curves import read_curves
from tests.unit.launcher.test_follower import log_of
from tests.unit.run_view.synthetic import SyntheticRun, configuration, started

SHOWN = PanelView(engine_status="up", is_engine_up=True, services=(), footer="", events=())
NAMED = {"FORGEMQ_KAFKA": "127.0.0.1:1", "FORGEMQ_ENGINE_URL": "http://127.0.0.1:1"}


async def processes_of(folder: RunFolder) -> RunProcesses:
    """The processes of a run whose broker and engine are elsewhere and that has no services."""
    settings = LauncherSettings(memory_min_bytes_without_engine=0)
    setup = RunSetup(folder=folder, configuration=configuration(), settings=settings, environ=NAMED)
    processes = RunProcesses(setup, note=lambda _: None)
    processes.start_engines()
    assert await processes.start_broker(stop=asyncio.Event())
    return processes


def display_of(follower: Follower, folder: RunFolder) -> RunDisplay:
    """A display without a terminal that writes the run's curves."""
    return RunDisplay(
        Screen(Console(file=io.StringIO())),
        curves=CurveWriter(folder.path),
        state=follower.state,
        panel_view=lambda: SHOWN,
    )


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow in the block: a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_is_full_when_curves_are_written_fails_the_run_with_its_reason(
    tmp_path: Path,
) -> None:
    log: MemoryLog = await log_of(SyntheticRun().play(steps=3))
    folder = RunFolder(tmp_path / "r")
    folder.make(configuration())
    processes, follower = await processes_of(folder), Follower(log, started())
    await follower.catch_up()
    stop = StopSignal(kill=processes.kill, note=lambda _: None)
    with full_disk():
        outcome = await watch_run(processes, follower, display_of(follower, folder), stop=stop)
    await processes.stop()
    assert outcome.reason == "failed"
    assert "File too large" in outcome.detail


async def test_a_run_that_is_asked_to_end_is_interrupted_and_says_who_asked(tmp_path: Path) -> None:
    """A request to an earlier start of the run is on the log, too."""
    log: MemoryLog = await log_of(SyntheticRun().play(steps=2))
    folder = RunFolder(tmp_path / "r")
    folder.make(configuration())
    processes, follower = await processes_of(folder), Follower(log, started())
    begun_ms = started().started_ms
    asked = RequestedEnd(run="r", started_ms=begun_ms - 1, requested_ms=1, detail="too old")
    await request_end(log, asked)
    stop = StopSignal(kill=processes.kill, note=lambda _: None)
    running = asyncio.ensure_future(
        watch_run(processes, follower, display_of(follower, folder), stop=stop)
    )
    await asyncio.sleep(0.3)
    assert not running.done()
    await request_end(
        log, msgspec.structs.replace(asked, started_ms=begun_ms, detail="reward fell")
    )
    async with asyncio.timeout(5):
        outcome = await running
    await processes.stop()
    detail = "asked to end by `forgemq stop`: reward fell"
    assert outcome == Outcome("interrupted", detail, is_requested=True)
    assert list(read_curves(folder.path)) == [0, 1]


async def test_the_panel_that_stays_on_the_terminal_has_what_was_said_last(tmp_path: Path) -> None:
    """The interruption comes right behind a look of the display; the next is due in a second."""
    log: MemoryLog = await log_of(SyntheticRun().play(steps=1))
    follower = Follower(log, started())
    await follower.catch_up()
    terminal = io.StringIO()
    screen = Screen(Console(file=terminal, force_terminal=True, width=100))
    display = RunDisplay(
        screen,
        curves=None,
        state=follower.state,
        panel_view=lambda: msgspec.structs.replace(SHOWN, events=screen.events),
    )
    screen.open()
    showing = asyncio.ensure_future(display.show())
    await asyncio.sleep(0)
    screen.say("stopping everything; Ctrl-C again kills")
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    screen.close()
    assert "Ctrl-C again kills" in terminal.getvalue()


def test_a_panel_breaks_no_line_between_a_service_and_its_dot() -> None:
    services = tuple(ShownService(name=f"service-{n}", is_up=True) for n in range(9))
    console = Console(file=io.StringIO(), width=80)
    state = Follower(MemoryLog(run="r"), started()).state()
    console.print(panel(state, msgspec.structs.replace(SHOWN, services=services)))
    printed = console.file.getvalue()
    assert [f"\u25cfservice-{n}" in printed for n in range(9)] == [True] * 9


@pytest.fixture
def gone_terminal() -> Iterator[io.TextIOBase]:
    """A terminal that somebody closed: writing to it fails with EIO."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        os.close(ours)
        yield terminal
        discard(terminal)


@pytest.fixture
def gone_pipe() -> Iterator[io.TextIOBase]:
    """A pipe whose reader has ended: writing to it fails with EPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        yield pipe
        discard(pipe)


def discard(file: io.TextIOBase) -> None:
    """Let what is buffered go nowhere, so that the file can be closed."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), file.fileno())


@pytest.mark.parametrize("stdout", ["gone_terminal", "gone_pipe"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_screen_goes_on_without_the_terminal_or_the_reader_that_went_away(
    request: pytest.FixtureRequest, tmp_path: Path, stdout: str, is_terminal: bool
) -> None:
    file = request.getfixturevalue(stdout)
    screen = Screen(Console(file=file, force_terminal=is_terminal))
    state = Follower(MemoryLog(run="r"), started()).state()
    # At a broken pipe rich points the standard output at /dev/null; pytest's must stay.
    with (tmp_path / "stdout").open("w") as own, redirect_stdout(own):
        screen.say("interrupted; stopping services")
        screen.open()
        screen.show(state, SHOWN)
        screen.close()
        screen.print("the table")
        screen.say("continue with")
    assert screen.events[0].endswith("interrupted; stopping services")
    assert screen.events[-1].endswith("continue with")


async def test_who_only_watches_a_run_ends_once_nobody_reads(
    gone_pipe: io.TextIOBase, tmp_path: Path
) -> None:
    screen = Screen(Console(file=gone_pipe))
    follower = Follower(await log_of(SyntheticRun().play(steps=1)), started())
    # At a broken pipe rich points the standard output at /dev/null; pytest's must stay.
    with (tmp_path / "stdout").open("w") as own, redirect_stdout(own):
        async with asyncio.timeout(10):
            assert await show_until_ended(follower, screen) is None
