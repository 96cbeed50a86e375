"""`forgemq replay`: runs the journals of transform services again.

Services never import one another, so each replays its own journal, in a process of its own.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console

from forgemq_launcher import exit_status
from forgemq_launcher.commands.run_on_broker import run_broker
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.services import service_environ

STATUS_ORDER = (exit_status.FAILED, exit_status.REFUSED, exit_status.OK)
"""Worst first: a difference, then a service that could not replay, then equal bytes."""


async def replay_journals(
    folder: RunFolder,
    environ: Mapping[str, str],
    console: Console,
    *,
    services: Sequence[str],
    arguments: Sequence[str],
) -> int:
    """Run `python -m forgemq_<service> replay` with these arguments and print what it prints.

    Returns:
        0: all equal. 1: a difference, or a failure. 2: refused, e.g. inputs that are not kept.
    """
    statuses: set[int] = set()
    async with run_broker(folder, environ) as (reached, _):
        shared = {
            **reached,
            "FORGEMQ_RUN": folder.run,
        }
        if (folder / "blobs").is_dir():
            shared.setdefault("FORGEMQ_BLOBS", str(folder / "blobs"))
        for service in services:
            own = service_environ(shared, service)
            command = ["replay", *arguments]
            statuses.add(await _print_replay(service, command, environ=own, console=console))
    return next((status for status in STATUS_ORDER if status in statuses), exit_status.FAILED)


async def _print_replay(
    service: str, arguments: Sequence[str], *, environ: Mapping[str, str], console: Console
) -> int:
    """Run a service with these arguments and print what it prints; returns its exit status."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"forgemq_{service}", *arguments),
        env=dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").rstrip("\n")
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
