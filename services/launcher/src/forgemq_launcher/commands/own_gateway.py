"""The gateway of a run, for commands that ask it: one that is named, or that of a run up here."""

from collections.abc import Mapping
from typing import NamedTuple

from forgemq_launcher.run_folder import RunFolder, RunFolderError

GATEWAY_URL = "FORGEMQ_AGENTS_GATEWAY_URL"
ADMIN_KEY = "FORGEMQ_AGENTS_ADMIN_KEY"


class RunGateway(NamedTuple):
    """Where a run's gateway is, and the key of its admin API."""

    url: str
    admin_key: str
    is_here: bool
    """Whether a launcher on this machine holds the run."""


def run_gateway(folder: RunFolder, environ: Mapping[str, str], *, host: str) -> RunGateway:
    """The gateway that the environment names, else that of the run in this folder.

    Args:
        folder: Of the run; not read if a gateway is named.
        environ: May have FORGEMQ_AGENTS_GATEWAY_URL and FORGEMQ_AGENTS_ADMIN_KEY.
        host: Where the gateways of this machine's runs listen.

    Raises:
        RunFolderError: no gateway is named, and the run is not known here or not up.
    """
    named = environ.get(GATEWAY_URL)
    if named:
        return RunGateway(named.rstrip("/"), environ.get(ADMIN_KEY, ""), is_here=False)
    folder.configuration()
    if not folder.is_up():
        raise RunFolderError(
            f"run {folder.run} is not up: start it with --resume, or set {GATEWAY_URL}"
        )
    key = environ.get("FORGEMQ_GATEWAY_ADMIN_KEY") or folder.admin_key()
    return RunGateway(f"http://{host}:{folder.gateway_port()}", key, is_here=True)
