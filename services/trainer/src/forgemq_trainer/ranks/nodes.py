"""The machines that train together: which of them this is, and when the first one is there."""

import socket
import time
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from forgemq_settings.environment import SettingsError, parse

PREFIX = "FORGEMQ_NODES_"
LOOK_EVERY_S = 1.0


class NodesSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_NODES_*` by the process that starts a machine's ranks."""

    count: Annotated[int, Meta(ge=1, le=1024, description="Machines that train together.")] = 1
    rendezvous: Annotated[
        str,
        Meta(
            pattern=r"^([A-Za-z0-9.-]+:[0-9]+)?$",
            description="Address and port of the first machine, where the others find it.",
        ),
    ] = ""
    address: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9.-]*$",
            description="Of this machine, for the others. The machine whose address sorts first "
            "has rank 0.",
        ),
    ] = ""
    revision: Annotated[
        str,
        Meta(
            min_length=1,
            description="Machines with another one do not train with this one: of the image and "
            "the settings, while they are replaced.",
        ),
    ] = "ranks"
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="A machine waits this long for the others.")
    ] = 900.0

    @property
    def is_first(self) -> bool:
        """Whether the others find each other here."""
        return self.address == self.rendezvous.partition(":")[0]


def nodes_of(environ: Mapping[str, str]) -> NodesSettings:
    """The settings of this machine.

    Raises:
        SettingsError: one is wrong, or lacks with several machines.
    """
    nodes = parse(NodesSettings, prefix=PREFIX, environ=environ)
    for name, value in (("RENDEZVOUS", nodes.rendezvous), ("ADDRESS", nodes.address)):
        if nodes.count > 1 and not value:
            raise SettingsError(f"{PREFIX}{name}: must be set if {PREFIX}COUNT is above 1")
    return nodes


def wait_for_first(nodes: NodesSettings, *, deadline_s: float) -> None:
    """Wait until the first machine's torchrun listens; at once on that machine.

    torchrun's own wait cannot be interrupted by a signal.

    Args:
        nodes: This machine's.
        deadline_s: On the monotonic clock.

    Raises:
        TimeoutError: it does not listen by then.
    """
    host, _, port = nodes.rendezvous.partition(":")
    while not nodes.is_first:
        try:
            socket.create_connection((host, int(port)), timeout=LOOK_EVERY_S).close()
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"nothing listens on {nodes.rendezvous} after {nodes.start_timeout_s:g} s: "
                    f"{error}"
                ) from error
            time.sleep(LOOK_EVERY_S)
        else:
            return
