"""Engines, broker and services of one run as one thing: started, kept up, stopped."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import cached_property

import psutil

from forgemq_bus.kafka import KafkaConnection
from forgemq_launcher.core.outside_agents import outside_agents
from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.run_key import console_key_file, run_key
from forgemq_launcher.run_setup import RunSetup
from forgemq_launcher.upkeep.broker import RunBroker
from forgemq_launcher.upkeep.engine_model import write_engine_model
from forgemq_launcher.upkeep.engine_servers import (
    LaneServers,
    added_addresses_count,
    added_servers,
    addresses_count,
    servers,
)
from forgemq_launcher.upkeep.engines import Engines
from forgemq_launcher.upkeep.gateway_status import says_training_ended
from forgemq_launcher.upkeep.lane_upkeep import LaneUpkeep
from forgemq_launcher.upkeep.machine import check_memory, engine_port, listening_socket
from forgemq_launcher.upkeep.named_engines import NamedEngines, check_lanes_unnamed, named_urls
from forgemq_launcher.upkeep.scrape_targets import failed_target, scrape_targets, write_targets
from forgemq_launcher.upkeep.services import Addresses, has_tls, inference_spec, service_specs
from forgemq_launcher.upkeep.silence import SilenceWatch
from forgemq_launcher.upkeep.supervisor import Note, ServiceSpec, ServiceStatus, Supervisor

CONSOLE_PORT_PREFERRED = 8080
"""Taken if it is free, so that the page of the usual run is where people look for it."""


class RunProcesses:
    """All processes of one run on this machine.

    Lifecycle: `start_engines` and `start_broker`, `plan_services`, one task `keep`
    until the run is over, `stop_services`, which leaves the broker up for the audit, and `stop`.
    `kill` at any time.
    """

    def __init__(self, setup: RunSetup, *, note: Note) -> None:
        settings = setup.settings
        self._setup = setup
        self._key = run_key(setup.folder, setup.environ)
        self._note = note
        self._policy = RestartPolicy(
            restarts_max=settings.restarts_max, span_s=settings.restarts_span_s
        )
        self._broker = RunBroker(setup.folder / "kafka", environ=setup.environ, note=note)
        self._engines: Engines | NamedEngines | None = None
        self._supervisor = Supervisor(policy=self._policy, grace_s=settings.stop_grace_s, note=note)
        self._silence = SilenceWatch(self._supervisor.alive_paths, note=note)
        self._addresses: Addresses | None = None
        self._specs: tuple[ServiceSpec, ...] = ()
        self._listeners: list[socket.socket] = []
        self._engine_ports: list[socket.socket] = []
        self.agents_ended = asyncio.Event()
        self.has_failed = False

    @property
    def connection(self) -> KafkaConnection:
        """How to reach the broker; after `start_broker` only."""
        return self._broker.connection

    @property
    def engines(self) -> Engines | NamedEngines:
        """The engines of all lanes; after `start_engines` only."""
        assert self._engines is not None, "start_engines comes first"
        return self._engines

    @property
    def has_agents(self) -> bool:
        """Whether agents are among the planned services; else groups come from outside."""
        return any(spec.name == "agents" for spec in self._specs)

    def gateway_says_training_ended(self) -> bool:
        """Whether the gateway answers now, and says that training has ended."""
        addresses = self._addresses
        return addresses is not None and says_training_ended(
            addresses.gateway_url, admin_key=self._key.present()
        )

    def service_statuses(self) -> tuple[ServiceStatus, ...]:
        """Every service in the order of its start."""
        return self._supervisor.statuses()

    @property
    def silent_services(self) -> frozenset[str]:
        """Names of those that are up and do not work."""
        return self._silence.silent

    def start_engines(self) -> None:
        """Start an engine for each lane, or note those that a setting names; returns at once.

        Raises:
            MachineError: too little memory, too few GPUs, no free port, or no model of engines.
            EngineServerError: a process cannot be started.
        """
        setup, settings = self._setup, self._setup.settings
        named = named_urls(
            setup.environ.get("FORGEMQ_ENGINE_URL", ""), lanes=setup.configuration.log.lanes
        )
        if named:
            check_lanes_unnamed(setup.configuration)
            check_memory(bytes_min=settings.memory_min_bytes_without_engine)
            self._engines = NamedEngines(
                named, silence_s_max=settings.start_timeout_s, note=self._note
            )
            self._note(f"using the engine at {', '.join(named)}")
            return
        check_memory(bytes_min=settings.memory_min_bytes)
        # SGLang listens a minute after its start: another program may not get its port meanwhile.
        for _ in range(addresses_count(setup.configuration)):
            self._engine_ports.append(engine_port("127.0.0.1"))
        write_engine_model(setup.configuration, folder=setup.folder / "engine")
        self._engines = own = Engines(
            servers(
                setup.configuration,
                folder=setup.folder / "engine",
                environ=setup.environ,
                addresses=[holder.getsockname() for holder in self._engine_ports],
            ),
            policy=self._policy,
            start_timeout_s=settings.start_timeout_s,
            note=self._note,
        )
        own.start()
        self._note(f"SGLang starts at {', '.join(own.urls)} (0.5-3 minutes)")

    async def start_broker(self, *, stop: asyncio.Event) -> bool:
        """Have a broker; returns False if `stop` was set before there was one."""
        if not await self._broker.start(stop=stop):
            return False
        kind = "Kafka answers" if self._broker.is_own else "using Kafka"
        self._note(f"{kind} at {self.connection.bootstrap}")
        return not stop.is_set()

    def plan_services(self) -> Addresses:
        """Choose ports and settle what each service is started with.

        Raises:
            MachineError: a port that a setting names is taken.
        """
        setup, settings = self._setup, self._setup.settings
        gateway, console = self._open_listeners()
        self._addresses = addresses = Addresses(
            kafka=self.connection.bootstrap,
            engine_urls=self.engines.urls,
            prefill_urls=self.engines.prefill_urls,
            host=settings.host,
            gateway_port=gateway.getsockname()[1],
            gateway_fd=gateway.fileno(),
            console_port=console.getsockname()[1],
            console_fd=console.fileno(),
            public_host=settings.public_host,
            has_gateway_tls=has_tls(setup.environ, "gateway"),
            has_console_tls=has_tls(setup.environ, "console"),
            admin_key=self._key.setting,
            admin_key_file=self._key.file,
            console_key_file=console_key_file(setup.folder, setup.environ, host=settings.host),
        )
        self._specs = service_specs(
            setup.configuration,
            folder=setup.folder,
            addresses=addresses,
            environ=setup.environ,
            gateways=settings.gateways,
            samples=setup.samples,
            agents_python=settings.agents_python,
        )
        self._write_targets()
        self._note(
            f"starting {len(self._specs)} services; gateway: {addresses.gateway_url}, "
            f"page: {addresses.console_url}"
        )
        if addresses.console_key_file:
            self._note(f"the page asks for a password: it is in {addresses.console_key_file}")
        self._note_outside_agents(addresses)
        return addresses

    @cached_property
    def lanes(self) -> LaneUpkeep:
        """The processes of each lane; after `start_engines` only."""
        return LaneUpkeep(
            self.engines,
            self._supervisor,
            spec_of=self._inference_spec,
            engines_of=self._added_engines,
            note=self._note,
        )

    def _write_targets(self) -> None:
        """Say where the metrics of the run are, if the environment asks for Prometheus."""
        targets = scrape_targets(self._specs, run=self._setup.configuration.run)
        write_targets(self._setup.folder.targets_path, targets)

    def _inference_spec(self, lane: int, engine_url: str, prefill_url: str) -> ServiceSpec:
        setup = self._setup
        spec = inference_spec(
            setup.configuration,
            folder=setup.folder,
            kafka=self.connection.bootstrap,
            environ=setup.environ,
            lane=lane,
            engine_url=engine_url,
            prefill_url=prefill_url,
        )
        self._specs = (*(each for each in self._specs if each.lane != lane), spec)
        self._write_targets()
        return spec

    def _added_engines(self, lane: int) -> LaneServers:
        """The engines of a lane that is added; not started.

        Raises:
            MachineError: there is no GPU for it, or no free port.
        """
        setup, engines = self._setup, self.engines
        assert isinstance(engines, Engines), "no engine is started beside named ones"
        count = added_addresses_count(lane, setup.configuration)
        ports = [engine_port("127.0.0.1") for _ in range(count)]
        self._engine_ports += ports
        return added_servers(
            lane,
            setup.configuration,
            folder=setup.folder / "engine",
            environ=setup.environ,
            addresses=[port.getsockname() for port in ports],
            in_use=engines.gpus,
        )

    def _note_outside_agents(self, addresses: Addresses) -> None:
        """Say how groups are asked for, if some queue has no agent of the run."""
        text = outside_agents(
            self._setup.configuration,
            gateway_url=addresses.gateway_url,
            admin_key=self._key.in_shell,
        )
        if text:
            self._note(text)

    def _open_listeners(self) -> list[socket.socket]:
        """Open the sockets of gateway and console; the gateway's where the run had it, if free.

        They are open while the run is up. So agents that connect while the gateway restarts wait
        for its next start and are not refused, and no other run takes a port meanwhile.
        """
        settings, folder = self._setup.settings, self._setup.folder
        for wanted, preferred in (
            (settings.gateway_port, folder.gateway_port()),
            (settings.console_port, CONSOLE_PORT_PREFERRED),
        ):
            listener = listening_socket(settings.host, wanted=wanted, preferred=preferred)
            self._listeners.append(listener)
        folder.keep_gateway_port(self._listeners[0].getsockname()[1])
        return self._listeners

    async def keep(self, *, may_end: Callable[[], bool]) -> None:
        """Start the planned services and keep everything up until cancelled.

        Sets `agents_ended` once the agents have played the run.

        Args:
            may_end: Whether a service that exits with status 0 has done its work.

        Raises:
            ProcessFailedError: a service refused its settings or died too often.
            EngineServerError: an engine did not come up or died too often.
            MachineError: a named engine did not answer for too long.
            BrokerError: the broker died too often.
        """
        async with asyncio.TaskGroup() as group:
            for spec in self._specs:
                if spec.lane is not None:
                    continue
                service = group.create_task(self._supervisor.keep(spec, may_end=may_end))
                if spec.name == "agents":
                    service.add_done_callback(lambda _: self.agents_ended.set())
            group.create_task(self._broker.keep(policy=self._policy, note=self._note))
            group.create_task(self._silence.run())
            first = {spec.lane: spec for spec in self._specs if spec.lane is not None}
            self.lanes.begin(group, first, may_end=may_end)

    async def stop_services(self) -> None:
        """Stop services and engines; idempotent."""
        # At the same time: the gateway asks again for what an engine was generating, next start.
        engines = [self._engines.stop()] if self._engines is not None else []
        await asyncio.gather(self._supervisor.stop(), *engines)
        # What has ended is not missed, unless it failed.
        run, environ = self._setup.configuration.run, self._setup.environ
        left = failed_target(environ, run=run) if self.has_failed else ()
        write_targets(self._setup.folder.targets_path, left)
        for listener in (*self._listeners, *self._engine_ports):
            listener.close()

    async def stop(self) -> None:
        """Stop everything that was started here, the broker last; idempotent."""
        await self.stop_services()
        await self._broker.stop()

    def kill(self) -> None:
        """SIGKILL to every process below this one."""
        self._supervisor.kill()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
