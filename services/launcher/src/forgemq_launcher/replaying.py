"""`forgemq replay`: lets a transform service run its own journal again and says what it found.

Services never import one another, so the service itself replays, as a process on the run's broker.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console

from forgemq_launcher.looking import broker_of
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.services import service_environ

STATUS_ORDER = (1, 2, 0)
"""Worst first: a difference or a failure, then what was refused."""


async def replay(
    folder: RunFolder,
    environ: Mapping[str, str],
    console: Console,
    *,
    services: Sequence[str],
    arguments: Sequence[str],
) -> int:
    """Replay the journals of these services.

    Args:
        folder: Of the run.
        environ: Of this process; what the services' own need is added.
        console: Gets what they print.
        services: Whose journals.
        arguments: Passed on to `python -m forgemq_<service> replay`.

    Returns:
        0: all equal. 1: a difference, or a failure. 2: refused, e.g. inputs that are not kept.
    """
    configuration = folder.configuration()
    statuses: set[int] = set()
    async with broker_of(folder, environ) as (reached, _):
        shared = {
            **reached,
            "FORGEMQ_RUN": configuration.run,
            "FORGEMQ_BLOBS": environ.get("FORGEMQ_BLOBS") or str(folder / "blobs"),
        }
        for service in services:
            own = service_environ(shared, service)
            status = await _told(service, ["replay", *arguments], environ=own, console=console)
            statuses.add(status)
    return next((status for status in STATUS_ORDER if status in statuses), 1)


async def _told(
    service: str, arguments: Sequence[str], *, environ: Mapping[str, str], console: Console
) -> int:
    """Run `python -m forgemq.<service>`, print what it prints; returns its exit status."""
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
