"""`forgemq end`: the end of a run whose services a person or a cluster keeps up.

It waits until the run is played or somebody asks for its end, gives its pods back, writes EndedRun,
and then report and curves.
Whatever interrupts it, the next start goes on: each part is done again or found done.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from forgemq_audit.run_report import audit_run
from forgemq_bus.kafka import KafkaConnection
from forgemq_bus.kafka_removal import kafka_removal
from forgemq_bus.log import Log
from forgemq_bus.names import in_run
from forgemq_contracts.requested_end import RequestedEnd
from forgemq_contracts.rounds import END_ROUND, end_round_groups
from forgemq_contracts.run import EndedRun, RunConfiguration, StartedRun
from forgemq_launcher import exit_status
from forgemq_launcher.commands.inspection import leave_report
from forgemq_launcher.commands.run_on_broker import run_on_broker
from forgemq_launcher.core.outside_agents import TOLD_S
from forgemq_launcher.core.workloads import Workload
from forgemq_launcher.display.lines import say
from forgemq_launcher.records.follower import Follower
from forgemq_launcher.records.run_end import end_of, end_requested
from forgemq_launcher.records.run_results import result_values
from forgemq_launcher.records.run_topics import last_trained_step, write_end
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.cluster import Cluster, ClusterError, own_cluster
from forgemq_launcher.upkeep.stop_signal import SIGNALS, asked_text
from forgemq_run_view.state import RunState
from forgemq_shell.clock import now_ms
from forgemq_shell.connection import kafka_connection
from forgemq_shell.interruption import ends_before

LOOK_EVERY_S = 5.0
"""Adds at most this to a run of minutes, and costs the broker one small read."""
STILL_S_MAX = 1800.0
"""After the last step: a run in which nothing happens for this long has lost its agents, and its
open groups are reported as open. Longer than any outage that a run is meant to survive."""
LEFT_S_MAX = 300.0
"""After the pods are given back: longer than the grace of any of them."""
RELEASE_TRIES_MAX = 10
"""With `LOOK_EVERY_S` between them: an API server that restarts is back in less than a minute."""


async def end(
    folder: RunFolder,
    environ: Mapping[str, str],
    console: Console,
    *,
    to: Path,
    workloads: Sequence[Workload],
) -> int:
    """End the run, or stop at a signal; returns the exit status.

    With workloads it stays until a signal: its pod then holds the report for who wants to copy it,
    and a deployment does not start it again.
    """
    cluster = own_cluster(environ) if workloads else None
    stop = asyncio.Event()
    # As the first process of a container it gets no signal that it does not ask for.
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    status = exit_status.INTERRUPTED

    async def work() -> None:
        nonlocal status
        status = await end_run(
            folder, environ, console, to=to, cluster=cluster, workloads=workloads
        )

    if await ends_before(stop, work()) and workloads:
        await stop.wait()
    return status


async def end_run(
    folder: RunFolder,
    environ: Mapping[str, str],
    console: Console,
    *,
    to: Path,
    cluster: Cluster | None = None,
    workloads: Sequence[Workload] = (),
) -> int:
    """Wait until the run is played or asked to end; write its end, its report and its curves.

    Args:
        folder: Names the run; nothing needs to be in it.
        environ: Names broker and blobs.
        console: Says each part.
        to: Folder of report.json and curves.jsonl.
        cluster: Of the workloads; none without them.
        workloads: Released as soon as the run is played or asked to end, in this order.

    Returns:
        The status, as of `audit`.
    """
    async with run_on_broker(folder, environ) as (log, started):
        ended, requested = await end_of(log, started), None
        if ended is None:
            await _change(cluster, workloads, is_released=False)
            say(console, f"waiting until run {folder.run} is played")
            requested = await played_or_asked(log, started)
        if requested is not None:
            say(console, asked_text(requested))
        elif ended is None:
            await asyncio.sleep(TOLD_S)  # Agents outside ask within this whether it is over.
        await _change(cluster, workloads, is_released=True)
        if requested is not None and workloads:
            await wait_until_left(kafka_connection(environ), folder.run)
        end = ended or new_end(started, requested, at_ms=now_ms())
        result, reader = await audit_run(log, started, reason=end.reason, now_ms=end.ended_ms)
        if ended is None:
            end = msgspec.structs.replace(end, results=result_values(result))
            await write_end(kafka_connection(environ), end)
        at_ms = end.ended_ms
    leave_report(result, reader.view.state(now_ms=at_ms), console, folder=to)
    return exit_status.OK if all(result.guarantees.values()) else exit_status.FAILED


async def played_or_asked(
    log: Log, started: StartedRun, *, look_every_s: float = LOOK_EVERY_S
) -> RequestedEnd | None:
    """Wait until the run is played; returns the request if somebody asks for its end before."""
    playing = asyncio.ensure_future(wait_until_played(log, started, look_every_s=look_every_s))
    asked = asyncio.ensure_future(end_requested(log, started))
    try:
        await asyncio.wait([playing, asked], return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            return asked.result()
        playing.result()
        return None
    finally:
        playing.cancel()
        asked.cancel()
        await asyncio.gather(playing, asked, return_exceptions=True)


def new_end(started: StartedRun, requested: RequestedEnd | None, *, at_ms: int) -> EndedRun:
    """The end of a run that was played, or that somebody asked for.

    It is not before the start, which a machine with another clock may have written.
    """
    ended_ms = max(at_ms, started.started_ms)
    if requested is None:
        return EndedRun(run=started.run, reason="completed", ended_ms=ended_ms)
    detail = asked_text(requested)
    return EndedRun(run=started.run, reason="interrupted", ended_ms=ended_ms, detail=detail)


async def wait_until_left(
    connection: KafkaConnection, run: str, *, left_s_max: float = LEFT_S_MAX
) -> None:
    """Return once no service but the console is a member of a consumer group of the run.

    So the run's last record comes after what these wrote. Trainer and lanes join no group.

    Args:
        connection: To the run's broker.
        run: Id of the run.
        left_s_max: It also returns after this time: a service that hangs is the cluster's to end.
    """
    deadline_s = time.monotonic() + left_s_max
    stays = in_run("console-", run=run)
    async with kafka_removal(connection) as removal:
        while time.monotonic() < deadline_s:
            joined = (await removal.find(run)).joined
            if all(group.startswith(stays) for group in joined):
                return
            await asyncio.sleep(LOOK_EVERY_S)


async def wait_until_played(
    log: Log,
    started: StartedRun,
    *,
    look_every_s: float = LOOK_EVERY_S,
    still_s_max: float = STILL_S_MAX,
) -> None:
    """Return once the last step is trained, the last round is played and no group is open.

    Args:
        log: Of the run.
        started: Its newest record.
        look_every_s: Between two looks.
        still_s_max: After the last step: it also returns if nothing changes for this long.
    """
    configuration = started.configuration
    steps = configuration.trainer.steps
    while await last_trained_step(log, configuration) + 1 < steps:  # noqa: ASYNC110 - no event
        await asyncio.sleep(look_every_s)
    follower = Follower(log, started)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follower.follow())
        seen, seen_s = _progress(follower.state()), time.monotonic()
        while not is_played(state := follower.state(), configuration):
            if _progress(state) != seen:
                seen, seen_s = _progress(state), time.monotonic()
            if time.monotonic() - seen_s > still_s_max:
                break
            await asyncio.sleep(look_every_s)
        following.cancel()


def is_played(state: RunState, configuration: RunConfiguration) -> bool:
    """Whether nothing of the run is left to play, train or retire."""
    in_round = [each for each in state.evaluations if each.round_name.startswith(END_ROUND)]
    return (
        state.steps_trained >= state.steps
        and sum(each.groups for each in in_round) >= end_round_groups(configuration)
        and not state.groups_open
    )


def _progress(state: RunState) -> tuple[int, int, int]:
    return state.groups_admitted, state.groups_open, state.completions


async def _change(
    cluster: Cluster | None, workloads: Sequence[Workload], *, is_released: bool
) -> None:
    """Release or resume each workload.

    Raises:
        ClusterError: the API server refuses one, or does not answer for long.
    """
    if cluster is None:
        return
    change = cluster.release if is_released else cluster.resume
    for workload in workloads:
        for left in reversed(range(RELEASE_TRIES_MAX)):
            try:
                await asyncio.to_thread(change, workload)
                break
            except ClusterError:
                if not left:
                    raise
                await asyncio.sleep(LOOK_EVERY_S)
