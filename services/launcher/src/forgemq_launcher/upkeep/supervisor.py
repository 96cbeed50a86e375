"""Service processes: each leads its own process group, is restarted if it dies, and is stopped."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.upkeep import child
from forgemq_shell.service import EXIT_OK, EXIT_REFUSED

Note: TypeAlias = Callable[[str], None]
"""Shows one line to the people at the terminal."""

LOG_TAIL_LINES = 12
"""The end of a traceback and the lines before it, on half a terminal."""
LOG_TAIL_BYTES = 16_384
"""Read to find them: 12 lines of over 1 KB each are already too long to show."""


class ProcessFailedError(Exception):
    """A service cannot be kept up; the text names it, its log and the log's last lines."""


class ServiceSpec(Struct, frozen=True, kw_only=True):
    """One service process: `python -m <module> <arguments>`.

    `stop_stage`: lower stages are stopped first. `inherited_fds`: open files that each start of it
    gets under the same numbers. `lane`: that it serves. `python`: "" for that of the launcher.
    `alive_path`: the file that it touches while it works; None if it touches none.
    """

    name: str
    module: str
    environ: Mapping[str, str]
    log_path: Path
    stop_stage: int
    arguments: tuple[str, ...] = ()
    inherited_fds: tuple[int, ...] = ()
    lane: int | None = None
    python: str = ""
    alive_path: Path | None = None


class ServiceStatus(Struct, frozen=True, kw_only=True):
    """How one service process is doing."""

    name: str
    pid: int | None
    restarts: int


@dataclass(slots=True)
class _Service:
    spec: ServiceSpec
    process: asyncio.subprocess.Process | None = None
    exits_s: list[float] = field(default_factory=list)
    is_ended: bool = False


class Supervisor:
    """Keeps service processes up.

    Lifecycle: one task `keep` for each service; `stop` ends them all by stage, `kill` at once.
    """

    def __init__(self, *, policy: RestartPolicy, grace_s: float, note: Note) -> None:
        self._policy = policy
        self._grace_s = grace_s
        self._note = note
        self._services: dict[str, _Service] = {}
        self._stopping = asyncio.Event()

    def statuses(self) -> tuple[ServiceStatus, ...]:
        """Every service in the order of its start; pid None while it is down."""
        return tuple(
            ServiceStatus(name=name, pid=_pid(service), restarts=len(service.exits_s))
            for name, service in self._services.items()
        )

    def alive_paths(self) -> dict[str, tuple[int, Path]]:
        """Process and file of each service that is up and touches one, by name."""
        return {
            name: (pid, path)
            for name, service in self._services.items()
            if (pid := _pid(service)) is not None and (path := service.spec.alive_path) is not None
        }

    async def keep(self, spec: ServiceSpec, *, may_end: Callable[[], bool]) -> None:
        """Start a service and restart it whenever it dies; return when it is done or stopped.

        Args:
            spec: The service.
            may_end: Whether an exit with status 0 means that its work is done.

        Raises:
            ProcessFailedError: it refused its settings, or died too often.
        """
        service = self._services[spec.name] = _Service(spec)
        while not self._is_over(service):
            if spec.alive_path is not None:
                spec.alive_path.unlink(missing_ok=True)  # Of a life before, so it is old.
            service.process = await _start_process(spec)
            status = await service.process.wait()
            _kill_left_behind(service.process)
            service.process = None  # Its number may become that of another process group.
            if self._is_over(service):
                return
            if status == EXIT_OK and may_end():
                return
            await self._wait_for_restart(service, status=status)

    async def _wait_for_restart(self, service: _Service, *, status: int) -> None:
        spec = service.spec
        service.exits_s.append(time.monotonic())
        delay_s = self._policy.delay_s(service.exits_s)
        how = _exit_text(status)
        if status == EXIT_REFUSED or delay_s is None:
            times = f" for the {len(service.exits_s)}th time" if len(service.exits_s) > 1 else ""
            tail = log_tail(spec.log_path)
            raise ProcessFailedError(
                f"{spec.name} {how}{times}; last lines of {spec.log_path}:\n{tail}"
            )
        self._note(f"{spec.name} {how}; restarting in {delay_s:.1f} s (log: {spec.log_path})")
        await asyncio.sleep(delay_s)

    async def end(self, name: str) -> None:
        """End one service for good, as `stop` ends all; its `keep` returns.

        It returns after a pause if the service waits for its restart.
        """
        service = self._services.pop(name, None)
        if service is None:
            return
        service.is_ended = True
        if service.process is not None:
            await _end_process(service.process, grace_s=self._grace_s)

    def _is_over(self, service: _Service) -> bool:
        return self._stopping.is_set() or service.is_ended

    async def stop(self) -> None:
        """Send SIGTERM to the services, stage by stage; SIGKILL to each that outlives its grace."""
        self._stopping.set()
        stages = sorted({service.spec.stop_stage for service in self._services.values()})
        for stage in stages:
            ends = [
                _end_process(service.process, grace_s=self._grace_s)
                for service in self._services.values()
                if service.spec.stop_stage == stage and service.process is not None
            ]
            await asyncio.gather(*ends)

    def kill(self) -> None:
        """Send SIGKILL to the process group of every service."""
        self._stopping.set()
        for service in self._services.values():
            if service.process is not None:
                _signal_group(service.process.pid, signal.SIGKILL)


def log_tail(path: Path) -> str:
    """The last lines of a log, indented; '' if there is no log."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])


async def _start_process(spec: ServiceSpec) -> asyncio.subprocess.Process:
    # Another Python has no launcher to import from.
    bound = ("-P", child.__file__) if spec.python else ("-m", child.__name__)
    with spec.log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            spec.python or sys.executable,
            *bound,
            str(os.getpid()),
            spec.module,
            *spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=spec.environ,
            pass_fds=spec.inherited_fds,
            # Ctrl-C in the terminal goes to the launcher. It is not a session, which Linux would
            # let wait for seconds beside engines on a CPU (autogroup).
            process_group=0,
        )


async def _end_process(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), timeout=grace_s)
    _kill_left_behind(process)
    await process.wait()


def _kill_left_behind(process: asyncio.subprocess.Process) -> None:
    """Kill the children that a service started and did not end: they are in its group."""
    _signal_group(process.pid, signal.SIGKILL)


def _pid(service: _Service) -> int | None:
    running = service.process is not None and service.process.returncode is None
    return service.process.pid if running and service.process is not None else None


def _exit_text(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
