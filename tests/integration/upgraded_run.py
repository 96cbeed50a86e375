"""A run whose services are processes of their own, each of one release or another."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from forgemq_launcher.upkeep.machine import listening_socket
from forgemq_launcher.upkeep.services import THREADS_VARIABLES
from forgemq_settings.ports import free_port
from tests.integration.launched_run import DIALOGUE, LOOK_EVERY_S, ROOT
from tests.previous_release import Release

ADMIN_KEY = "0123456789abcdef0123456789abcdef"
START_S_MAX = 300.0
STOP_S_MAX = 120.0
STEP_S_MAX = 400.0
STUCK_S = 60.0
"""Without a step for this long one more group may begin: one of those before may have failed."""

REPLICAS: Mapping[str, Sequence[str]] = {
    "gateway": ("gateway-0", "gateway-1"),
    "merger": ("merger-0", "merger-1"),
}
"""Names of a service's processes, if there are several."""

READY: Mapping[str, str] = {
    "agents": "training",
    "console": "listening",
    "gateway": "serving",
    "inference": "claimed",
    "merger": "assigned",
    "reward": "grading_assigned",
    "scheduler": "assigned",
    "trainer": "published",
}
"""What a service writes once it has begun to work."""


class Life(Struct, kw_only=True):
    """One process of a service.

    Attributes:
        name: Of the process.
        release: Whose code it ran.
        began_ms: When it was started.
        ended_ms: When it had ended; 0 while it runs.
        status: Exit status.
    """

    name: str
    release: str
    began_ms: int
    ended_ms: int = 0
    status: int | None = None


class UpgradedRun:
    """Processes of one run on a broker and an engine that are there.

    Lifecycle: `create`, `start` each service, `replace` them, `let_train` between, `close`.
    """

    def __init__(self, run_id: str, folder: Path, *, kafka: str, engine_url: str) -> None:
        """Start nothing yet."""
        self.run_id = run_id
        self.bootstrap = kafka
        self.folder = folder
        self.blobs = folder / "blobs"
        self.lives: list[Life] = []
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True)
        self._gate = folder / "gate"
        self._open_gate(0)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._began_at: dict[str, int] = {}
        # Both gateways accept at it, so that agents have one address through all their restarts.
        self._listener: socket.socket = listening_socket("127.0.0.1", wanted=0)
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threads = dict.fromkeys(THREADS_VARIABLES, "1")
        shared = {"HF_HUB_OFFLINE": "1", "DIALOGUE_GATE": str(self._gate), **threads}
        self._shared = {**os.environ, **shared, "FORGEMQ_RUN": run_id, "FORGEMQ_KAFKA": kafka}
        self._own = {
            "agents": {
                "FORGEMQ_AGENTS_GATEWAY_URL": url,
                "FORGEMQ_AGENTS_ADMIN_KEY": ADMIN_KEY,
                "FORGEMQ_AGENTS_CONFIGURATION": str(folder / "configuration.json"),
            },
            "auditor": {"FORGEMQ_AUDITOR_AUDIT_EVERY_S": "1"},
            "console": {"FORGEMQ_CONSOLE_PORT": str(free_port())},
            "gateway": {
                "FORGEMQ_GATEWAY_ADMIN_KEY": ADMIN_KEY,
                "FORGEMQ_GATEWAY_LISTENER_FD": str(self._listener.fileno()),
                "FORGEMQ_GATEWAY_PUBLIC_URL": url,
                "FORGEMQ_GATEWAY_PEER_PORT": "0",
            },
            "inference": {
                "FORGEMQ_INFERENCE_LANE": "0",
                "FORGEMQ_INFERENCE_ENGINE_URL": engine_url,
            },
            "trainer": {"FORGEMQ_TRAINER_FOLDER": str(folder / "checkpoints")},
        }

    @property
    def checkpoints(self) -> Path:
        """The trainer's, a folder for each step."""
        return self.folder / "checkpoints" / "checkpoints"

    def create(self, release: Release, *overrides: str) -> None:
        """Announce the run, and write the agents' file, with a release's launcher."""
        given = [DIALOGUE, f"run={self.run_id}", *overrides]
        self.tool(release, "create", *given)
        self.tool(release, "resolve", *given, "--to", str(self.folder / "configuration.json"))

    def tool(self, release: Release, *arguments: str) -> str:
        """What `forgemq ARGUMENTS` of a release prints; it must succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "forgemq_launcher", *arguments],
            cwd=ROOT,
            env={**self._environ(release), "FORGEMQ_BLOBS": str(self.blobs)},
            capture_output=True,
            text=True,
            timeout=STEP_S_MAX,
            check=False,
        )
        assert done.returncode == 0, f"forgemq {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, service: str, release: Release) -> None:
        """Start each process of a service and wait until it works."""
        for name in REPLICAS.get(service, (service,)):
            self._start(service, name, release)
            self._wait_ready(service, name)

    def replace(
        self, service: str, release: Release, *, by: signal.Signals = signal.SIGTERM
    ) -> Iterator[None]:
        """Stop each process of a service and start it from a release; one after another.

        Yields while the service has processes of two releases.
        """
        names = REPLICAS.get(service, (service,))
        for name in names:
            self.stop(name, by=by)
            self._start(service, name, release)
            self._wait_ready(service, name)
            if name != names[-1]:
                yield

    def stop(self, name: str, *, by: signal.Signals = signal.SIGTERM) -> int:
        """End a process; returns its exit status."""
        process = self._processes.pop(name)
        if process.poll() is None:
            process.send_signal(by)
        status = process.wait(STOP_S_MAX)
        life = next(life for life in reversed(self.lives) if life.name == name)
        life.ended_ms, life.status = now_ms(), status
        return status

    def names(self) -> list[str]:
        """Processes that were started and not stopped."""
        return list(self._processes)

    def let_begin(self, groups: int) -> None:
        """Let so many more groups begin."""
        self._open_gate(self._tasks + groups)

    def let_train(self, steps: int, *, groups: int) -> None:
        """Let so many groups begin; return once so many steps are trained in all."""
        self.let_begin(groups)
        moved_s = time.monotonic()
        trained = self.steps_trained()
        deadline_s = moved_s + STEP_S_MAX
        while trained < steps:
            assert time.monotonic() < deadline_s, f"{trained} of {steps} steps: {self.story()}"
            time.sleep(LOOK_EVERY_S)
            now = self.steps_trained()
            if now > trained:
                moved_s = time.monotonic()
            elif time.monotonic() - moved_s > STUCK_S:
                self.let_begin(1)
                moved_s = time.monotonic()
            trained = now

    def let_end(self) -> None:
        """Let every task begin; return once the agents have ended by themselves."""
        self._open_gate(1_000_000)
        self._wait(
            lambda: self._processes["agents"].poll() is not None, STEP_S_MAX, what="the agents end"
        )

    def steps_trained(self) -> int:
        """How many steps the trainer has reported, each counted once."""
        return len({event["step"] for event in self.events("trainer", "trained")})

    def events(self, name: str, event: str, *, since: int = 0) -> list[dict[str, Any]]:
        """Events of this kind of a process, over all its lives or behind a place in its log."""
        lines = self.log(name)[since:].splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and event in line]
        return [each for each in found if each.get("event") == event]

    def log(self, name: str) -> str:
        """What a process wrote, over all its lives."""
        path = self._logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def story(self) -> str:
        """The last lines of every process, for the message of a failed assertion."""
        logs = {path.stem: path.read_text(errors="replace") for path in self._logs.glob("*.log")}
        return "\n".join(f"--- {name}\n{text[-1500:]}" for name, text in sorted(logs.items()))

    def close(self) -> None:
        """Kill what still runs, by its id, with what it started."""
        for process in self._processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait()
        self._listener.close()

    def _environ(self, release: Release) -> dict[str, str]:
        return {**self._shared, "PYTHONPATH": release.python_path()}

    def _start(self, service: str, name: str, release: Release) -> None:
        environ = {
            **self._environ(release),
            **self._own.get(service, {}),
            "FORGEMQ_SERVICE_INSTANCE": name,
        }
        if service == "agents":
            del environ["FORGEMQ_KAFKA"]  # As in production: they speak HTTP only.
        self._began_at[name] = len(self.log(name))
        with (self._logs / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", f"forgemq_{service}"],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[self._listener.fileno()],
            )
        self.lives.append(Life(name=name, release=release.name, began_ms=now_ms()))

    def _wait_ready(self, service: str, name: str) -> None:
        if service not in READY:
            return

        def is_ready() -> bool:
            assert self._processes[name].poll() is None, f"{name} ended: {self.story()}"
            return bool(self.events(name, READY[service], since=self._began_at[name]))

        self._wait(is_ready, START_S_MAX, what=f"{name} writes {READY[service]}")

    def _wait(self, look: Callable[[], bool], within_s: float, *, what: str) -> None:
        deadline_s = time.monotonic() + within_s
        while not look():
            assert time.monotonic() < deadline_s, (
                f"not within {within_s:g} s: {what}: {self.story()}"
            )
            time.sleep(LOOK_EVERY_S)

    def _open_gate(self, tasks: int) -> None:
        self._tasks = tasks
        draft = self._gate.with_suffix(".draft")
        draft.write_text(str(tasks))
        draft.replace(self._gate)


def now_ms() -> int:
    """Unix time."""
    return int(time.time() * 1000)
