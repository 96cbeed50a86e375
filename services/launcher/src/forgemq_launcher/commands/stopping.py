"""`forgemq stop`: asks a run that is up to end early, and waits until it has."""

import asyncio
from collections.abc import Mapping

from rich.console import Console

from forgemq_contracts.requested_end import RequestedEnd
from forgemq_launcher import exit_status
from forgemq_launcher.commands.run_on_broker import run_on_broker
from forgemq_launcher.display.lines import say
from forgemq_launcher.records.run_end import end_of, request_end, run_ended
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_shell.clock import now_ms


async def stop(
    folder: RunFolder,
    environ: Mapping[str, str],
    console: Console,
    *,
    detail: str,
    timeout_s: float,
) -> int:
    """Ask the newest start of the run to end; returns 0 once it has, 1 if it takes too long.

    The request stays on the log, so a `forgemq end` that starts later takes it, too.

    Args:
        folder: Names the run.
        environ: Names the broker, unless a launcher on this machine holds the run.
        console: Says what happens.
        detail: Why, for those who read the run's end.
        timeout_s: Longest wait for the end.

    Raises:
        RunFolderError: the run has a broker of its own, and is down.
    """
    if not environ.get("FORGEMQ_KAFKA") and folder.path.is_dir() and not folder.is_up():
        raise RunFolderError(f"run {folder.run} is not up")
    async with run_on_broker(folder, environ) as (log, started):
        if ended := await end_of(log, started):
            say(console, f"run {folder.run} is over: {ended.reason}")
            return exit_status.OK
        requested = RequestedEnd(
            run=folder.run, started_ms=started.started_ms, requested_ms=now_ms(), detail=detail
        )
        await request_end(log, requested)
        say(console, f"run {folder.run} is asked to end")
        try:
            ended = await asyncio.wait_for(run_ended(log, started), timeout_s)
        except TimeoutError:
            say(
                console,
                f"run {folder.run} has not ended within {timeout_s:g} s: is its `forgemq run`, or "
                f"`forgemq end`, up? The request stays on its log",
            )
            return exit_status.FAILED
    say(console, f"run {folder.run} has ended: {ended.reason}")
    return exit_status.OK
