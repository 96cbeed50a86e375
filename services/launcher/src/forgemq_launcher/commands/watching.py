"""`forgemq watch`: the panel of a run that is up or over, from its log alone."""

import asyncio
import contextlib
from collections.abc import Mapping

from rich.console import Console

from forgemq_bus.errors import BlobError, LogError
from forgemq_contracts.rounds import JUDGED_ROUND
from forgemq_contracts.run import EndedRun
from forgemq_launcher import exit_status
from forgemq_launcher.commands.run_on_broker import run_on_broker
from forgemq_launcher.display.lines import left_out
from forgemq_launcher.display.panel import PanelView, ShownService
from forgemq_launcher.display.run_display import RunDisplay
from forgemq_launcher.display.screen import Screen
from forgemq_launcher.records.follower import Follower
from forgemq_launcher.records.told_reading import told_reading
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.stop_signal import SIGNALS
from forgemq_run_view.state import Activity, RunState
from forgemq_shell.clock import now_ms
from forgemq_shell.interruption import ends_before
from forgemq_telemetry.causes import causes

LOOK_EVERY_S = 0.1
"""For the end: a run's own broker is stopped soon after it."""
LAST_READ_S_MAX = 5.0
"""For the records beside the run's last one, if its broker is still there."""
SILENT_MS_MAX = 60_000
"""A service that wrote nothing for longer has a red dot; a long step silences the trainer."""
_GUARANTEES = ("G1", "G2", "G3", "G4", "G5")


async def watch(folder: RunFolder, environ: Mapping[str, str], console: Console) -> int:
    """Show a run until it is over, a signal comes, or nobody reads the output any more.

    The last two leave the run alone.

    Returns:
        The status with which the run ended, 130 after a signal, 1 without a reader.
    """
    stop = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    screen = Screen(console)
    status = exit_status.INTERRUPTED

    async def work() -> None:
        nonlocal status
        status = await _watch(folder, environ, screen)

    try:
        is_over = await ends_before(stop, work())
    finally:
        screen.close()
    if not is_over:
        screen.say(f"run {folder.run} is left as it is")
    return status


async def _watch(folder: RunFolder, environ: Mapping[str, str], screen: Screen) -> int:
    def without_blobs(error: BlobError) -> None:
        screen.say(left_out(error))

    async with run_on_broker(folder, environ) as (log, started):
        follower = Follower(log, started, without_blobs=without_blobs)
        screen.say(f"reading run {folder.run}")
        async with told_reading(log, started.configuration, say=screen.say):
            await follower.catch_up()
        screen.open()
        ended = await show_until_ended(follower, screen)
    screen.close()
    if ended is None:
        return exit_status.FAILED
    detail = f": {ended.detail}" if ended.detail else ""
    screen.say(f"run {folder.run} {_ENDS[ended.reason]}{detail}")
    return status_of(ended)


_ENDS = {"completed": "is completed", "interrupted": "was interrupted", "failed": "has failed"}


async def show_until_ended(follower: Follower, screen: Screen) -> EndedRun | None:
    """Keep the run on the screen; returns how it ended, or None once the screen is gone."""
    newest = _state_of(follower)

    def state() -> RunState:
        nonlocal newest
        newest = _state_of(follower)
        return newest

    display = RunDisplay(
        screen, curves=None, state=state, panel_view=lambda: _panel_view(newest, screen)
    )
    try:
        async with asyncio.TaskGroup() as group:
            showing = group.create_task(display.show())
            following = group.create_task(follower.follow())
            while (ended := follower.view.end) is None:
                if screen.is_gone:
                    break
                await asyncio.sleep(LOOK_EVERY_S)
            following.cancel()
            await asyncio.wait([following])
            showing.cancel()
    except* LogError as errors:
        raise causes(errors)[0] from errors
    if ended is None:
        return None
    # The broker of a run on one machine may have ended with it.
    with contextlib.suppress(LogError, TimeoutError):
        async with asyncio.timeout(LAST_READ_S_MAX):
            await follower.catch_up()
    screen.show(state(), _panel_view(newest, screen))
    return ended


def _state_of(follower: Follower) -> RunState:
    end = follower.view.end
    return follower.view.state(now_ms=end.ended_ms if end else now_ms())


def status_of(ended: EndedRun) -> int:
    """The exit status that `forgemq run` has for a run that ended so."""
    match ended.reason:
        case "completed":
            values = {each.name: each.value for each in ended.results}
            held = all(values.get(name, 1.0) == 1.0 for name in _GUARANTEES)
            return exit_status.OK if held else exit_status.FAILED
        case "interrupted":
            return exit_status.INTERRUPTED
        case "failed":
            return exit_status.FAILED


def _panel_view(state: RunState, screen: Screen) -> PanelView:
    return PanelView(
        engine_status="no lane serves",
        is_engine_up=True,
        services=tuple(_shown_service(each, now_ms=state.now_ms) for each in state.services),
        footer="Ctrl-C leaves the run alone",
        events=screen.events,
        is_judging=any(each.round_name == JUDGED_ROUND for each in state.evaluations),
    )


def _shown_service(activity: Activity, *, now_ms: int) -> ShownService:
    silent_ms = max(0, now_ms - activity.last_ms)
    return ShownService(
        name=activity.service,
        is_up=silent_ms <= SILENT_MS_MAX,
        detail=f" {silent_ms // 1000} s",
    )
