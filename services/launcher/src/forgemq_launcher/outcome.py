"""Watches one run while it is up and says how it ended."""

import asyncio
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from forgemq_bus.broker import BrokerError
from forgemq_bus.errors import LogError
from forgemq_launcher.core.outside_agents import TOLD_S
from forgemq_launcher.display.run_display import RunDisplay
from forgemq_launcher.records.follower import Follower, GroupsFailingError
from forgemq_launcher.upkeep.machine import MachineError
from forgemq_launcher.upkeep.run_processes import RunProcesses
from forgemq_launcher.upkeep.stop_signal import StopSignal, asked_text
from forgemq_launcher.upkeep.supervisor import ProcessFailedError
from forgemq_sglang_cpu.server import EngineServerError
from forgemq_shell.interruption import wait_at_most
from forgemq_telemetry.causes import causes

SETTLE_TIMEOUT_S = 120.0
"""After the agents are done, the last groups still pass reward, merger and scheduler: seconds, or
minutes if one of these restarts meanwhile. Groups still open then are reported as open."""
SETTLED_CHECK_EVERY_S = 0.5
"""Adds at most this to a run of minutes."""

FAILURES = (
    MachineError,
    ProcessFailedError,
    EngineServerError,
    BrokerError,
    LogError,
    GroupsFailingError,
    OSError,
)
"""Each of these ends a run with one clear line instead of a traceback. OSError: a full disk."""


class Outcome(NamedTuple):
    """How a run ended; `detail` says why it failed, or who asked for its end."""

    reason: Literal["completed", "interrupted", "failed"]
    detail: str = ""
    is_requested: bool = False
    """Whether `forgemq stop` asked for the end: the asker has a report to look at."""


async def watch_run(
    processes: RunProcesses,
    follower: Follower,
    display: RunDisplay,
    *,
    stop: StopSignal,
    trains: bool = True,
) -> Outcome:
    """Keep a run up and show it until it is played, a signal or a request comes, or it fails.

    It is played once its own agents have ended, or, if it has none, once the last step is trained.
    One that does not train is played once its agents have ended.
    """

    def may_end() -> bool:
        return follower.is_trained or not trains

    failures: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(processes.keep(may_end=may_end)),
                group.create_task(follower.follow()),
                group.create_task(follower.watch_groups()),
                group.create_task(follower.follow_lanes(processes.lanes.follow)),
                group.create_task(display.show()),
                group.create_task(_take_request(follower, stop)),
            ]
            if not processes.has_agents:
                tasks.append(group.create_task(_end_agents(follower, processes.agents_ended)))
            await stop.wait_unless(processes.agents_ended)
            await _wait_settled(follower, stop, may_end=may_end)
            if not processes.has_agents:
                await tell_agents(processes.gateway_says_training_ended, stop=stop)
            for task in tasks:
                task.cancel()
    except* FAILURES as errors:
        failures = causes(errors)
    if failures:
        return Outcome("failed", "\n".join(map(str, failures)))
    if stop.requested is not None:
        return Outcome("interrupted", asked_text(stop.requested), is_requested=True)
    return Outcome("interrupted" if stop.event.is_set() else "completed")


async def _take_request(follower: Follower, stop: StopSignal) -> None:
    stop.take_request(await follower.end_requested())


async def _end_agents(follower: Follower, ended: asyncio.Event) -> None:
    """Set `ended` once the last step is trained."""
    while not follower.is_trained:  # noqa: ASYNC110 - the state has no event for it
        await asyncio.sleep(SETTLED_CHECK_EVERY_S)
    ended.set()


async def _wait_settled(
    follower: Follower, stop: StopSignal, *, may_end: Callable[[], bool]
) -> None:
    """Return once the last groups are retired, a signal came, or it took too long."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while not stop.event.is_set() and time.monotonic() < deadline_s:
        if may_end() and not follower.view.groups_open:
            return
        await asyncio.sleep(SETTLED_CHECK_EVERY_S)


async def tell_agents(
    says_ended: Callable[[], bool], *, stop: StopSignal, told_s: float = TOLD_S
) -> None:
    """Return once agents outside can have read that training has ended, or a signal came.

    Without it a gateway that was killed near the end would be stopped before it answers again, and
    its agents would try an address without a server until they give up.

    Args:
        says_ended: Asks the gateway, in a thread.
        stop: Ends the wait.
        told_s: How long the gateway stays up after it said so.
    """
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while not stop.event.is_set() and time.monotonic() < deadline_s:
        if await asyncio.to_thread(says_ended):
            await wait_at_most(stop.event, told_s)
            return
        await asyncio.sleep(SETTLED_CHECK_EVERY_S)
