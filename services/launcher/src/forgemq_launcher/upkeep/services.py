"""Which service processes a run consists of, and the environment of each."""

from collections.abc import Mapping
from functools import partial
from itertools import zip_longest

from msgspec import Struct
from msgspec.structs import replace

from forgemq_contracts.queues import supplied_queues
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.supervisor import ServiceSpec
from forgemq_settings.user_code import for_user_code

THREADS_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)

SERVICES = (
    "agents",
    "auditor",
    "console",
    "gateway",
    "inference",
    "merger",
    "reward",
    "scheduler",
    "trainer",
)

TORCHRUN = "forgemq_trainer.ranks.torchrun"
"""Module that starts the trainer's ranks on this machine and ends them all when one dies."""


class Addresses(Struct, frozen=True, kw_only=True):
    """Where the parts of a run find one another.

    Attributes:
        prefill_urls: By lane, "" for a lane whose engine reads its contexts; () if none has
            another.
        gateway_fd: Bound socket of the gateway, which the launcher keeps over its restarts.
        console_fd: The same of the console.
        admin_key: Of the gateway; "" if only the file has it, whose first line is the newest.
        console_key_file: "" if the console needs no key, or has one of its own settings.
        public_host: By which gateway and console are reached; "" for `host`.
        has_gateway_tls: Whether the gateway has a certificate.
        has_console_tls: Whether the console has one.
    """

    kafka: str
    engine_urls: tuple[str, ...]
    prefill_urls: tuple[str, ...] = ()
    host: str
    gateway_port: int
    gateway_fd: int
    console_port: int
    console_fd: int
    admin_key: str = ""
    admin_key_file: str = ""
    console_key_file: str = ""
    public_host: str = ""
    has_gateway_tls: bool = False
    has_console_tls: bool = False

    @property
    def gateway_url(self) -> str:
        """Base address of the gateway."""
        return base_url(
            self.public_host or self.host, self.gateway_port, is_tls=self.has_gateway_tls
        )

    @property
    def console_url(self) -> str:
        """Address of the page."""
        return base_url(
            self.public_host or self.host, self.console_port, is_tls=self.has_console_tls
        )


def base_url(host: str, port: int, *, is_tls: bool) -> str:
    """Base address of a server."""
    return f"{'https' if is_tls else 'http'}://{host}:{port}"


def has_tls(environ: Mapping[str, str], service: str) -> bool:
    """Whether a service has a certificate, by its own setting."""
    return bool(environ.get(f"FORGEMQ_{service.upper()}_TLS_CERTIFICATE_FILE"))


def service_specs(
    configuration: RunConfiguration,
    *,
    folder: RunFolder,
    addresses: Addresses,
    environ: Mapping[str, str],
    gateways: int = 1,
    samples: int = 0,
    agents_python: str = "",
) -> tuple[ServiceSpec, ...]:
    """Every service process of the run, in the order of start.

    With `samples` above 0 its agents play so many episodes of each held-out task, and there is no
    trainer. `agents_python` plays the agents; "" for the launcher's own.
    """
    shared = _shared_environ(environ, run=configuration.run, kafka=addresses.kafka)
    spec = partial(_spec, shared, folder)
    own = _own_environs(configuration, folder=folder, addresses=addresses)
    entry = _gateway_environ(own["gateway"], count=gateways)
    lanes = zip_longest(addresses.engine_urls, addresses.prefill_urls, fillvalue="")
    playing = own["agents"] | ({"FORGEMQ_AGENTS_SAMPLES": str(samples)} if samples else {})
    agents = [spec("agents", playing, stop_stage=0)] if supplied_queues(configuration) else []
    agents = [replace(each, python=agents_python) for each in agents]
    ranks = configuration.trainer.world_size
    trainer = [] if samples else [spec("trainer", own["trainer"], stop_stage=2, ranks=ranks)]
    return (
        *(
            spec("gateway", entry, stop_stage=1, number=number, fds=(addresses.gateway_fd,))
            for number in (range(gateways) if gateways > 1 else (-1,))
        ),
        *(
            spec("inference", _lane_environ(lane, *urls), stop_stage=2, number=lane)
            for lane, urls in enumerate(lanes)
        ),
        spec("scheduler", {}, stop_stage=2),
        spec("reward", own["reward"], stop_stage=2),
        spec("merger", {}, stop_stage=2),
        *trainer,
        spec("auditor", {}, stop_stage=3),  # Last: it then audits what was retired last.
        spec("console", own["console"], stop_stage=2, fds=(addresses.console_fd,)),
        *agents,
    )


def inference_spec(
    configuration: RunConfiguration,
    *,
    folder: RunFolder,
    kafka: str,
    environ: Mapping[str, str],
    lane: int,
    engine_url: str,
    prefill_url: str = "",
) -> ServiceSpec:
    """The inference process of a lane that is added, beside the engines at these addresses."""
    shared = _shared_environ(environ, run=configuration.run, kafka=kafka)
    own = _lane_environ(lane, engine_url, prefill_url)
    return _spec(shared, folder, "inference", own, stop_stage=2, number=lane)


def _spec(
    shared: Mapping[str, str],
    folder: RunFolder,
    service: str,
    own: Mapping[str, str],
    *,
    stop_stage: int,
    number: int = -1,
    ranks: int = 1,
    fds: tuple[int, ...] = (),
) -> ServiceSpec:
    """One process of a service.

    Args:
        shared: Variables of all services of the run.
        folder: Of the run.
        service: Its name.
        own: Variables of this process alone.
        stop_stage: As of `ServiceSpec`.
        number: Among several of the service, of inference the lane; -1: it is the only one.
        ranks: Of the trainer.
        fds: Sockets that it inherits.
    """
    module, *arguments = _command(service, ranks=ranks)
    name = service if number < 0 else f"{service}-{number}"
    # Agents stand on no shell, which touches it.
    alive_path = None if service == "agents" else folder / "logs" / f"{name}.alive"
    return ServiceSpec(
        name=name,
        module=module,
        arguments=tuple(arguments),
        # A service that is started again gets its partitions at once, instead of when the
        # brokers take the one before it for dead.
        environ={
            **service_environ(shared, service),
            "FORGEMQ_SERVICE_INSTANCE": name,
            "FORGEMQ_TELEMETRY_NUMBER": str(max(0, number)),
            **({"FORGEMQ_SERVICE_ALIVE_FILE": str(alive_path)} if alive_path else {}),
            **own,
        },
        log_path=folder / "logs" / f"{name}.log",
        stop_stage=stop_stage,
        inherited_fds=fds,
        lane=number if service == "inference" else None,
        alive_path=alive_path,
    )


def _gateway_environ(own: Mapping[str, str], *, count: int) -> Mapping[str, str]:
    """Several gateways share the one port, and find each other at ports of their own."""
    return {**own, "FORGEMQ_GATEWAY_PEER_PORT": "0"} if count > 1 else own


def _lane_environ(lane: int, url: str, prefill_url: str) -> Mapping[str, str]:
    own = {"FORGEMQ_INFERENCE_LANE": str(lane), "FORGEMQ_INFERENCE_ENGINE_URL": url}
    return own | ({"FORGEMQ_INFERENCE_PREFILL_URL": prefill_url} if prefill_url else {})


def _own_environs(
    configuration: RunConfiguration, *, folder: RunFolder, addresses: Addresses
) -> dict[str, dict[str, str]]:
    """Variables that one service gets and no other, by service."""
    public, key_file = addresses.public_host, addresses.console_key_file
    return {
        "gateway": {
            "FORGEMQ_GATEWAY_LISTENER_FD": str(addresses.gateway_fd),
            **_key_environ("GATEWAY", addresses),
            **({"FORGEMQ_GATEWAY_PUBLIC_URL": addresses.gateway_url} if public else {}),
        },
        "trainer": {
            "FORGEMQ_TRAINER_FOLDER": str(folder / "checkpoints"),
            **dict.fromkeys(THREADS_VARIABLES, str(configuration.trainer.threads)),
        },
        "console": {
            "FORGEMQ_CONSOLE_HOST": addresses.host,
            "FORGEMQ_CONSOLE_PORT": str(addresses.console_port),
            "FORGEMQ_CONSOLE_LISTENER_FD": str(addresses.console_fd),
            **({"FORGEMQ_CONSOLE_KEY_FILE": key_file} if key_file else {}),
        },
        # For the user's graders, which get no variable that begins with FORGEMQ_.
        "reward": {"GATEWAY_URL": addresses.gateway_url},
        "agents": {
            "FORGEMQ_AGENTS_GATEWAY_URL": addresses.gateway_url,
            **_key_environ("AGENTS", addresses),
            "FORGEMQ_AGENTS_CONFIGURATION": str(folder / "configuration.json"),
        },
    }


def _key_environ(service: str, addresses: Addresses) -> dict[str, str]:
    """Where a service finds the admin key; in its environment only if it is in the launcher's."""
    name = f"FORGEMQ_{service}_ADMIN_KEY"
    if addresses.admin_key:
        return {name: addresses.admin_key}
    return {f"{name}_FILE": addresses.admin_key_file}


def service_environ(environ: Mapping[str, str], service: str) -> dict[str, str]:
    """The environment without other services' settings, which may be secret.

    Agents get neither the broker nor the blob store, nor its credentials: they speak HTTP only.
    """
    others = {"launcher", *SERVICES} - {service}
    hidden = tuple(f"FORGEMQ_{other.upper()}_" for other in others)
    if service == "agents":
        hidden += ("FORGEMQ_KAFKA", "FORGEMQ_BLOBS")
    seen = {name: value for name, value in environ.items() if not name.startswith(hidden)}
    if service != "agents":
        return seen
    own = {name: value for name, value in seen.items() if name.startswith(("FORGEMQ_", "OTEL_"))}
    return for_user_code(seen) | own


def _command(service: str, *, ranks: int) -> tuple[str, ...]:
    """Module and arguments: of the service, or of torchrun for one of several ranks."""
    module = f"forgemq_{service}"
    if ranks == 1:
        return (module,)
    return (TORCHRUN, str(ranks))


def _shared_environ(environ: Mapping[str, str], *, run: str, kafka: str) -> dict[str, str]:
    # One thread each: nine processes and an engine share the cores, and their thread pools would
    # only compete. The trainer then gets the number that the run says.
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    threads = dict.fromkeys(THREADS_VARIABLES, "1")
    return {**environ, **quiet, **threads, "FORGEMQ_RUN": run, "FORGEMQ_KAFKA": kafka}
