"""`forgemq import`: adds conversations that were finished elsewhere to a run that is up."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from forgemq_launcher.commands.own_gateway import ADMIN_KEY, GATEWAY_URL, run_gateway
from forgemq_launcher.commands.service_process import print_service
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.services import service_environ


async def import_conversations(
    folder: RunFolder,
    environ: Mapping[str, str],
    console: Console,
    *,
    host: str,
    file: Path,
    domain: str,
) -> int:
    """Run `python -m forgemq_agents import` against the run's gateway and print what it prints.

    Args:
        folder: Of the run.
        environ: If it names a gateway for agents, that one is used, and the folder is not read.
        console: Where to print.
        host: By which the gateways of this machine's runs are reached.
        file: One conversation a line.
        domain: Of the run; the conversations belong to it.

    Returns:
        0: all are in the run. 1: the gateway refused or was away. 2: refused, nothing is imported.
        130: stopped by a signal.

    Raises:
        RunFolderError: the run is not known here or not up, and no gateway is named.
    """
    gateway = run_gateway(folder, environ, host=host)
    found = {GATEWAY_URL: gateway.url, ADMIN_KEY: gateway.admin_key} if gateway.is_here else {}
    own = service_environ({**environ, **found}, "agents")
    arguments = ["import", str(file), "--domain", domain]
    return await print_service("agents", arguments, environ=own, console=console, ends_itself=True)
