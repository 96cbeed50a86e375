"""The gateway of a run, for commands that ask it: one that is named, or that of a run up here."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from forgemq_contracts.run import Model
from forgemq_launcher.core.completed_run import nothing_left
from forgemq_launcher.run_folder import RunFolder, RunFolderError, first_key
from forgemq_launcher.run_key import run_key
from forgemq_launcher.upkeep.services import base_url, has_tls

GATEWAY_URL = "FORGEMQ_AGENTS_GATEWAY_URL"
ADMIN_KEY = "FORGEMQ_AGENTS_ADMIN_KEY"


class RunGateway(NamedTuple):
    """Where a run's gateway is, and the key of its admin API."""

    url: str
    admin_key: str
    is_here: bool
    """Whether a launcher on this machine holds the run."""
    model: Model | None = None
    """Of a run that is here."""


def run_gateway(folder: RunFolder, environ: Mapping[str, str], *, host: str) -> RunGateway:
    """The gateway that the environment names, else that of the run in this folder.

    Args:
        folder: Of the run; not read if a gateway is named.
        environ: May have FORGEMQ_AGENTS_GATEWAY_URL, with FORGEMQ_AGENTS_ADMIN_KEY or its _FILE.
        host: By which the gateways of this machine's runs are reached.

    Raises:
        RunFolderError: no gateway is named, and the run is not known here or not up, with what
            to do; or a file of keys has none.
    """
    named = environ.get(GATEWAY_URL)
    if named:
        file = environ.get(f"{ADMIN_KEY}_FILE")
        key = first_key(Path(file)) if file else environ.get(ADMIN_KEY, "")
        return RunGateway(named.rstrip("/"), key, is_here=False)
    if not folder.path.is_dir():
        raise RunFolderError(
            f"there is no run {folder.run!r} in {folder.path.parent}: for one that is up elsewhere "
            f"set {GATEWAY_URL} and {ADMIN_KEY}"
        )
    configuration = folder.configuration()
    if not folder.is_up():
        folder.check_resumable()
        if folder.is_completed():
            raise RunFolderError(nothing_left(configuration))
        raise RunFolderError(
            f"run {folder.run} is not up: start it with --resume, or set {GATEWAY_URL}"
        )
    key = run_key(folder, environ).present()
    url = base_url(host, folder.gateway_port(), is_tls=has_tls(environ, "gateway"))
    return RunGateway(url, key, is_here=True, model=configuration.model)
