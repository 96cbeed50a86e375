"""One run from start to end: brings up its parts, shows it, takes them down, reports.

The order: engine first (it takes longest), broker, topics, StartedRun, services, then the panel
until the agents have played everything, a signal came, or something could not be kept up.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import psutil
from rich.console import Console

from forgemq_bus.blobs import BlobStore
from forgemq_bus.broker import BrokerError
from forgemq_bus.errors import LogError
from forgemq_bus.kafka import KafkaLog
from forgemq_bus.log import Log
from forgemq_contracts.fields import NamedValue
from forgemq_contracts.run import EndedRun, RunConfiguration, StartedRun
from forgemq_contracts.topics import ENDED_RUNS, STARTED_RUNS, Topic
from forgemq_launcher import ending
from forgemq_launcher.broker import RunBroker
from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.curves import CurveWriter
from forgemq_launcher.engines import Engines, servers
from forgemq_launcher.follow import Follower
from forgemq_launcher.machine import MachineError, check_memory, port
from forgemq_launcher.named_engines import NamedEngines, named_urls
from forgemq_launcher.news import news
from forgemq_launcher.panel import PanelView
from forgemq_launcher.processes import ProcessFailedError, ServiceSpec, Supervisor
from forgemq_launcher.report_files import table
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.screen import Screen
from forgemq_launcher.services import Addresses, service_specs
from forgemq_launcher.settings import LauncherSettings
from forgemq_launcher.topics_of_run import (
    announce,
    conclude,
    create_topics,
    last_trained_step,
)
from forgemq_run_view import audit, auditing, view
from forgemq_run_view.report import Report
from forgemq_run_view.state import RunState
from forgemq_sglang_cpu.server import EngineServerError
from forgemq_telemetry.causes import causes_of
from forgemq_telemetry.clock import now_ms

CONSUMES: tuple[Topic, ...] = tuple(
    dict.fromkeys((STARTED_RUNS, *view.TOPICS, *audit.TOPICS, *auditing.TOPICS))
)
PRODUCES: tuple[Topic, ...] = (STARTED_RUNS, ENDED_RUNS)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
SHOW_EVERY_S = 1.0
SIGNAL_ECHO_S = 1.0
"""One Ctrl-C may arrive twice: from the terminal, and passed on by make or a shell."""
SETTLE_TIMEOUT_S = 120.0
"""After the agents are done, the last groups still pass reward, merger and scheduler."""


class GroupsFailingError(Exception):
    """No group of a domain comes to anything; the message names the newest and why."""


FAILURES = (
    MachineError,
    ProcessFailedError,
    EngineServerError,
    BrokerError,
    LogError,
    GroupsFailingError,
)
"""What ends a run with one clear line instead of a traceback."""

Reason: TypeAlias = Literal["completed", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One `forgemq run`: which run, with which settings."""

    folder: RunFolder
    configuration: RunConfiguration
    settings: LauncherSettings
    environ: Mapping[str, str]


class RunningRun:
    """One run while it is up.

    Lifecycle: `play` once. It brings everything up, stays until the run ends, and takes down all
    it started, whatever happens in between.
    """

    def __init__(self, launch: Launch, console: Console) -> None:
        settings = launch.settings
        policy = RestartPolicy(restarts_max=settings.restarts_max, span_s=settings.restarts_span_s)
        self._launch = launch
        self._policy = policy
        self._console = console
        self._screen = Screen(console)
        self._stop = asyncio.Event()
        self._signalled_s = 0.0
        self._broker = RunBroker(
            launch.folder / "kafka", environ=launch.environ, note=self._screen.say
        )
        self._engines: Engines | NamedEngines | None = None
        self._supervisor = Supervisor(
            policy=policy, grace_s=settings.stop_grace_s, note=self._screen.say
        )

    async def play(self) -> int:
        """The exit status.

        0: completed and every guarantee held. 1: failed, or one did not. 130: interrupted.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled)
        try:
            return await self._phases()
        except FAILURES as error:
            self._screen.close()
            self._screen.say(f"failed: {error}")
            return EXIT_FAILED
        finally:
            self._screen.close()
            await self._down()

    async def _phases(self) -> int:
        engine_urls = self._start_engines()
        if not await self._broker.start(stop=self._stop):
            return EXIT_INTERRUPTED
        kind = "Kafka answers" if self._broker.is_own else "using Kafka"
        self._screen.say(f"{kind} at {self._broker.connection.bootstrap}")
        if self._stop.is_set():
            return EXIT_INTERRUPTED
        configuration = self._launch.configuration
        blobs = self._launch.environ.get("FORGEMQ_BLOBS") or str(self._launch.folder / "blobs")
        log = KafkaLog(
            self._broker.connection,
            run=configuration.run,
            blobs=BlobStore(blobs),
            inline_bytes_max=configuration.log.inline_bytes_max,
        )
        try:
            self._screen.say(f"{await create_topics(log, configuration)} topics are there")
            started = StartedRun(
                run=configuration.run,
                configuration=configuration,
                blobs=blobs,
                started_ms=now_ms(),
                resumed_from_step=await last_trained_step(log, configuration),
            )
            await announce(self._broker.connection, started)
            return await self._started(log, started, self._addresses(engine_urls))
        finally:
            await log.close()

    async def _started(self, log: Log, started: StartedRun, addresses: Addresses) -> int:
        limit = self._launch.settings.groups_failed_max
        follower = Follower(log, started, groups_failed_max=limit)
        reason, detail = await self._watched(follower, addresses)
        self._screen.say(f"{reason}; stopping services")
        await self._stop_processes()
        ended_ms = now_ms()
        run = self._launch.folder.run
        if reason != "completed":
            await conclude(
                self._broker.connection,
                EndedRun(run=run, reason=reason, ended_ms=ended_ms, detail=detail),
            )
            self._screen.say(detail or "open groups stay open")
            self._screen.say(f"continue with: make demo RESUME={run}")
            return EXIT_INTERRUPTED if reason == "interrupted" else EXIT_FAILED
        return await self._reported(log, started, ended_ms=ended_ms)

    async def _reported(self, log: Log, started: StartedRun, *, ended_ms: int) -> int:
        self._screen.say("checking the guarantees on the log")
        result, follower = await ending.audited(log, started, reason="completed", now_ms=ended_ms)
        ending.write(self._launch.folder, result, follower, now_ms=ended_ms)
        await conclude(
            self._broker.connection,
            EndedRun(
                run=started.run, reason="completed", ended_ms=ended_ms, results=_results(result)
            ),
        )
        self._console.print(table(result))
        self._screen.say(f"report: {self._launch.folder / 'report.json'} and report.png")
        return EXIT_OK if all(result.guarantees.values()) else EXIT_FAILED

    def _start_engines(self) -> tuple[str, ...]:
        launch, settings = self._launch, self._launch.settings
        named = named_urls(
            launch.environ.get("FORGEMQ_ENGINE_URL", ""), lanes=launch.configuration.log.lanes
        )
        if named:
            check_memory(bytes_min=settings.memory_min_bytes_without_engine)
            self._engines = NamedEngines(
                named, silence_s_max=settings.start_timeout_s, note=self._screen.say
            )
            self._screen.say(f"using the engine at {', '.join(named)}")
            return named
        check_memory(bytes_min=settings.memory_min_bytes)
        self._engines = own = Engines(
            servers(
                launch.configuration,
                folder=launch.folder / "engine",
                environ=launch.environ,
                host="127.0.0.1",
            ),
            policy=self._policy,
            start_timeout_s=settings.start_timeout_s,
            note=self._screen.say,
        )
        own.start()
        self._screen.say(f"SGLang starts at {', '.join(own.urls)} (1-3 minutes)")
        return own.urls

    def _addresses(self, engine_urls: tuple[str, ...]) -> Addresses:
        settings = self._launch.settings
        return Addresses(
            kafka=self._broker.connection.bootstrap,
            engine_urls=engine_urls,
            host=settings.host,
            gateway_port=port(settings.host, wanted=settings.gateway_port),
            console_port=port(settings.host, wanted=settings.console_port, preferred=8080),
            admin_key=self._launch.environ.get("FORGEMQ_GATEWAY_ADMIN_KEY")
            or self._launch.folder.admin_key(),
        )

    async def _watched(self, follower: Follower, addresses: Addresses) -> tuple[Reason, str]:
        """Keep everything up and show it until the run ends, one way or another."""
        specs = service_specs(
            self._launch.configuration,
            folder=self._launch.folder,
            addresses=addresses,
            environ=self._launch.environ,
        )
        self._screen.say(f"starting {len(specs)} services; page: {addresses.console_url}")
        self._screen.open()
        reason: Reason = "failed"
        failures: Sequence[BaseException] = ()
        try:
            reason = await self._kept(follower, addresses, specs)
        except* FAILURES as errors:
            failures = causes_of(errors)
        finally:
            self._screen.close()
        return reason, "\n".join(str(error) for error in failures)

    async def _kept(
        self, follower: Follower, addresses: Addresses, specs: Sequence[ServiceSpec]
    ) -> Reason:
        def is_trained() -> bool:
            state = follower.view.state(now_ms=now_ms())
            return state.steps_trained >= state.steps

        async with asyncio.TaskGroup() as group:
            services = {
                spec.name: group.create_task(self._supervisor.keep(spec, may_end=is_trained))
                for spec in specs
            }
            tasks = [*services.values(), group.create_task(follower.follow())]
            tasks.append(group.create_task(self._show(follower, addresses)))
            tasks.append(
                group.create_task(self._broker.keep(policy=self._policy, note=self._screen.say))
            )
            if self._engines is not None:
                tasks.append(group.create_task(self._engines.keep()))
            stopping = group.create_task(self._stop.wait())
            await asyncio.wait([services["agents"], stopping], return_when=asyncio.FIRST_COMPLETED)
            await self._settle(follower)
            for task in (*tasks, stopping):
                task.cancel()
        return "interrupted" if self._stop.is_set() else "completed"

    async def _settle(self, follower: Follower) -> None:
        """Wait until the last groups are retired, or a signal comes, or it takes too long."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while not self._stop.is_set() and time.monotonic() < deadline_s:
            state = follower.view.state(now_ms=now_ms())
            if state.steps_trained >= state.steps and not state.groups_open:
                return
            await asyncio.sleep(SHOW_EVERY_S / 2)

    async def _show(self, follower: Follower, addresses: Addresses) -> None:
        """Show the run for ever.

        Raises:
            GroupsFailingError: its groups fail one after the other.
        """
        curves = CurveWriter(self._launch.folder.path)
        before: RunState | None = None
        try:
            while True:
                state = follower.view.state(now_ms=now_ms())
                for text in news(before, state):
                    self._screen.say(text)
                self._screen.show(state, self._panel_view(addresses))
                curves.write(state)
                if verdict := follower.failing.verdict():
                    raise GroupsFailingError(verdict)
                before = state
                await asyncio.sleep(SHOW_EVERY_S)
        finally:
            curves.write(follower.view.state(now_ms=now_ms()))
            curves.close()

    def _panel_view(self, addresses: Addresses) -> PanelView:
        return PanelView(
            engine_status=self._engines.status() if self._engines else "",
            is_engine_up=self._engines is not None and self._engines.is_up,
            services=self._supervisor.statuses(),
            console_url=addresses.console_url,
            folder=str(self._launch.folder.path),
            events=self._screen.events,
        )

    def _signalled(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._signalled_s = time.monotonic()
            self._screen.say("stopping everything; Ctrl-C again kills")
            return
        if time.monotonic() - self._signalled_s < SIGNAL_ECHO_S:
            return
        self._supervisor.kill()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    async def _down(self) -> None:
        await self._stop_processes()
        await self._broker.stop()

    async def _stop_processes(self) -> None:
        # Side by side: what an engine was generating is asked for again at the next start.
        engines = [self._engines.stop()] if self._engines is not None else []
        await asyncio.gather(self._supervisor.stop(), *engines)


def _results(result: Report) -> tuple[NamedValue, ...]:
    values = {
        "success_start": result.success_start,
        "success_end": result.success_end,
        "success_start_greedy": result.success_start_greedy,
        "success_end_greedy": result.success_end_greedy,
    }
    held = {name: float(holds) for name, holds in result.guarantees.items()}
    named = {name: value for name, value in (values | held).items() if value is not None}
    return tuple(NamedValue(name=name, value=value) for name, value in named.items())
