"""`forgemq resume`: announces a run once more that was stopped; others start its services."""

from collections.abc import Mapping

from rich.console import Console

from forgemq_launcher import exit_status
from forgemq_launcher.commands.run_on_broker import run_on_broker
from forgemq_launcher.display.lines import say
from forgemq_launcher.records.announcement import next_start
from forgemq_launcher.records.run_end import end_of
from forgemq_launcher.records.run_topics import write_start
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_settings.environment import SettingsError
from forgemq_shell.clock import now_ms
from forgemq_shell.connection import kafka_connection


async def resume(folder: RunFolder, environ: Mapping[str, str], console: Console) -> int:
    """Announce another start of the run, with the configuration and blobs of its newest one.

    Raises:
        RunFolderError: the run is up, was killed, or has nothing left to play.
        SettingsError: FORGEMQ_KAFKA is not set: `forgemq run --resume` continues a run that has a
            broker of its own.
    """
    if not environ.get("FORGEMQ_KAFKA"):
        raise SettingsError(
            "FORGEMQ_KAFKA: must be set; forgemq run --resume continues a run on this machine"
        )
    async with run_on_broker(folder, environ) as (log, started):
        ended = await end_of(log, started)
        if ended is None:
            raise RunFolderError(f"run {folder.run} has not ended: start its services")
        if ended.reason == "completed":
            raise RunFolderError(f"run {folder.run} is completed: there is nothing left to play")
        # By the clock of this machine it may be earlier than the end, which another one wrote.
        at_ms = max(now_ms(), ended.ended_ms + 1)
        again = await next_start(log, started.configuration, blobs=started.blobs, now_ms=at_ms)
        await write_start(kafka_connection(environ), again)
    text = f"run {folder.run} is announced again, behind step {again.resumed_from_step}"
    say(console, f"{text}: start its services")
    return exit_status.OK
