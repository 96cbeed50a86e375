"""Settings of the launcher, read from `FORGEMQ_LAUNCHER_*`."""

from typing import Annotated

from msgspec import Meta, Struct


class LauncherSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where runs lie, what a run may use, and how long to wait."""

    runs: Annotated[str, Meta(min_length=1, description="Folder of all runs.")] = "runs"
    memory_min_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Free memory demanded before a start with its own engine: about 4 GB for "
            "the engine on a CPU, the rest for the broker and nine processes.",
        ),
    ] = 7_000_000_000
    memory_min_bytes_without_engine: Annotated[
        int, Meta(ge=0, description="Free memory demanded if a setting names the engines.")
    ] = 3_000_000_000
    start_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Time for an engine to answer, and 5 s more for each GB of its weights; a "
            "CPU takes 0.5-3 minutes.",
        ),
    ] = 600.0
    stop_grace_s: Annotated[
        float,
        Meta(
            gt=0,
            description="From SIGTERM to SIGKILL; more than the 15 s in which a service stops.",
        ),
    ] = 20.0
    restarts_max: Annotated[
        int,
        Meta(
            ge=0, description="Restarts of a process in restarts_span_s; one more is a failed run."
        ),
    ] = 6
    restarts_span_s: Annotated[
        float, Meta(gt=0, description="Deaths further apart than this are unrelated accidents.")
    ] = 300.0
    groups_failed_max: Annotated[
        int,
        Meta(
            ge=0,
            description="Groups of one domain that fail or expire in a row; then the run fails. "
            "0: three times the slots of its queue.",
        ),
    ] = 0
    agents_python: Annotated[
        str,
        Meta(
            description="Python that plays the agents, as /home/me/agents/bin/python, for packages "
            "that do not go with the engine's; forgemq-agents is installed there. '': this one."
        ),
    ] = ""
    tensorboard: Annotated[
        bool,
        Meta(
            description="Also write the curves as TensorBoard's event files, in the run's folder."
        ),
    ] = False
    host: Annotated[str, Meta(description="Gateway and console listen here.")] = "127.0.0.1"
    public_host: Annotated[
        str,
        Meta(
            description="Name or address by which agents and browsers reach `host`, as the "
            "certificate of gateway and console names it. '': `host`."
        ),
    ] = ""
    gateways: Annotated[
        int, Meta(ge=1, description="Gateway processes, which share the one port.")
    ] = 1
    gateway_port: Annotated[int, Meta(ge=0, le=65535, description="0: any free port.")] = 0
    console_port: Annotated[
        int, Meta(ge=0, le=65535, description="0: 8080 if it is free, else any free port.")
    ] = 0

    @property
    def reached_host(self) -> str:
        """By which agents, browsers and commands reach gateway and console."""
        return self.public_host or self.host
