"""OS processes of services: started in groups of their own, restarted when they die, stopped."""

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
from forgemq_shell.service import EXIT_OK, EXIT_REFUSED

Note: TypeAlias = Callable[[str], None]
"""Takes one line for the people at the terminal."""

CHILD_MODULE = "forgemq_launcher.upkeep.child"
LOG_TAIL_LINES = 12
"""The end of a traceback and the lines before it, on half a terminal."""
LOG_TAIL_BYTES = 16_384
"""Read to find them: 12 lines of over 1 KB each are already too long to show."""


class ProcessFailedError(Exception):
    """A service cannot be kept up; the text names it, its log and the log's last lines."""


class ServiceSpec(Struct, frozen=True, kw_only=True):
    """One service process.

    `stop_stage`: lower stages are stopped first. `arguments`: of the module's command line.
    """

    name: str
    module: str
    environ: Mapping[str, str]
    log_path: Path
    stop_stage: int
    arguments: tuple[str, ...] = ()


class ServiceStatus(Struct, frozen=True, kw_only=True):
    """How one service process is doing."""

    name: str
    pid: int | None
    restarts: int


@dataclass(slots=True)
class _Kept:
    spec: ServiceSpec
    process: asyncio.subprocess.Process | None = None
    exits_s: list[float] = field(default_factory=list)


class Supervisor:
    """Keeps service processes up.

    Lifecycle: `keep` one task a service; `stop` ends them all, by stage; `kill` at once.
    """

    def __init__(self, *, policy: RestartPolicy, grace_s: float, note: Note) -> None:
        self._policy = policy
        self._grace_s = grace_s
        self._note = note
        self._kept: dict[str, _Kept] = {}
        self._stopping = asyncio.Event()

    def statuses(self) -> tuple[ServiceStatus, ...]:
        """Every service in the order of its start; pid None while it is down."""
        return tuple(
            ServiceStatus(name=name, pid=_pid(kept), restarts=len(kept.exits_s))
            for name, kept in self._kept.items()
        )

    async def keep(self, spec: ServiceSpec, *, may_end: Callable[[], bool]) -> None:
        """Start a service and restart it whenever it dies; returns when it is done or stopped.

        Args:
            spec: The service.
            may_end: Whether an exit with status 0 is its end, and no reason to restart it.

        Raises:
            ProcessFailedError: it refused its settings, or died too often.
        """
        kept = self._kept.setdefault(spec.name, _Kept(spec))
        while not self._stopping.is_set():
            kept.process = await _start(spec)
            status = await kept.process.wait()
            if self._stopping.is_set():
                return
            if status == EXIT_OK and may_end():
                return
            await self._pause(kept, status=status)

    async def _pause(self, kept: _Kept, *, status: int) -> None:
        spec = kept.spec
        kept.exits_s.append(time.monotonic())
        delay_s = self._policy.delay_s(kept.exits_s)
        how = _exit_text(status)
        if status == EXIT_REFUSED or delay_s is None:
            times = f" for the {len(kept.exits_s)}th time" if len(kept.exits_s) > 1 else ""
            tail = log_tail(spec.log_path)
            raise ProcessFailedError(
                f"{spec.name} {how}{times}; last lines of {spec.log_path}:\n{tail}"
            )
        self._note(f"{spec.name} {how}; restarting in {delay_s:.1f} s (log: {spec.log_path})")
        await asyncio.sleep(delay_s)

    async def stop(self) -> None:
        """SIGTERM to each service, stage by stage; SIGKILL to what outlives its grace."""
        self._stopping.set()
        stages = sorted({kept.spec.stop_stage for kept in self._kept.values()})
        for stage in stages:
            processes = [
                kept.process
                for kept in self._kept.values()
                if kept.spec.stop_stage == stage and kept.process is not None
            ]
            await asyncio.gather(*(_end(process, grace_s=self._grace_s) for process in processes))

    def kill(self) -> None:
        """SIGKILL to the group of every service, at once."""
        self._stopping.set()
        for kept in self._kept.values():
            if kept.process is not None:
                _signal_group(kept.process.pid, signal.SIGKILL)


def log_tail(path: Path) -> str:
    """The last lines of a log, indented; '' where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])


async def _start(spec: ServiceSpec) -> asyncio.subprocess.Process:
    bound = ("-m", CHILD_MODULE, str(os.getpid()), spec.module)
    with spec.log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *bound,
            *spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=spec.environ,
            start_new_session=True,
        )


async def _end(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), timeout=grace_s)
    # What the service itself started and left behind ends with it.
    _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _pid(kept: _Kept) -> int | None:
    running = kept.process is not None and kept.process.returncode is None
    return kept.process.pid if running and kept.process is not None else None


def _exit_text(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
