"""`forgemq replay`: runs the journals of transform services again.

Services never import one another, so each replays its own journal, in a process of its own.
"""

from collections.abc import Mapping, Sequence

from rich.console import Console

from forgemq_launcher import exit_status
from forgemq_launcher.commands.run_on_broker import run_broker
from forgemq_launcher.commands.service_process import print_service
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
            statuses.add(await print_service(service, command, environ=own, console=console))
    return next((status for status in STATUS_ORDER if status in statuses), exit_status.FAILED)
