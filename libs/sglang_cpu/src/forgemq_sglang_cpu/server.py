"""One SGLang server as a child process: starts it, waits until it is healthy, stops it.

Nothing here retries or restarts: the caller decides. All calls block; an async caller runs them in
a thread.
"""

import http.client
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import msgspec

from forgemq_settings.memory import available_memory_bytes
from forgemq_sglang_cpu.cuda_toolkit import ToolkitError, toolkit_environment
from forgemq_sglang_cpu.left_files import (
    make_temporary,
    pids_of_group,
    remove_left_files,
    shared_files_of,
)
from forgemq_sglang_cpu.options import (
    MEMORY_BYTES_MIN,
    EngineOptions,
    command_line,
    environment,
    has_fp8_blocks,
    is_mixture,
)
from forgemq_sglang_cpu.pair import EXPERTS_REFUSAL, missing_on_cpu, missing_on_gpu

Progress: TypeAlias = Callable[[float, str], None]
"""Called about every 2 s of waiting with seconds waited and the newest line of the log."""

WEIGHT_BYTES_PER_S_MIN = 2e8
"""Least rate at which an engine reads its weights: a network's disk. 460 GB have 38 minutes."""
LOG_TAIL_LINES = 15  # A Python traceback's end, with its error.
_LOG_LINE_CHARACTERS_MAX = 400  # SGLang logs all its options in a line of 20,000.
_LOG_TAIL_BYTES = 64 * 1024  # LOG_TAIL_LINES of 4 KiB each.
_POLL_S = 0.5  # A start takes 12 s at least.
_PROGRESS_EVERY_S = 2.0  # Often enough for a person who watches.
_KILLED_WITHIN_S = 10.0  # The kernel frees several GB of each process.
_GONE_POLL_S = 0.05  # Often: a stop waits for it.


class EngineServerError(Exception):
    """The server could not start or stop; one line, then the log's last lines."""


class EngineServer:
    """One server, which leads its process group and writes to `<folder>/engine.log`.

    Lifecycle: `start`, `wait_healthy`, `stop`; a stopped server can be started again. Also a
    context manager, which waits with the default deadline.

    Example:
        with EngineServer("model", Path("logs"), port=31000) as engine:
            urllib.request.urlopen(engine.url + "/model_info")
    """

    def __init__(
        self,
        model_path: str,
        folder: Path,
        *,
        port: int,
        options: EngineOptions | None = None,
        host: str = "127.0.0.1",
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        """Describe a server; nothing is started.

        Args:
            model_path: Folder in Hugging Face format.
            folder: For the log; created if it does not exist.
            port: TCP port of the HTTP server.
            options: See `EngineOptions`.
            host: Address to listen on.
            inherited: Environment to pass on; None: that of this process.
        """
        self._model_path = model_path
        self._folder = folder
        self._port = port
        self._options = options or EngineOptions()
        self._host = host
        self._inherited = inherited
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: frozenset[Path] = frozenset()
        self._temporary: Path | None = None

    @property
    def url(self) -> str:
        """Base address of the server."""
        return f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id, also of the process group; None unless started."""
        return self._process.pid if self._process else None

    @property
    def log_path(self) -> Path:
        """The server's standard output and error."""
        return self._folder / "engine.log"

    def start(self) -> None:
        """Start the processes; returns before the server answers.

        Raises:
            EngineServerError: no model, no free port, too little memory, already running, or
                nothing that compiles kernels for a GPU.
        """
        if self.is_running():
            raise EngineServerError(f"the engine on port {self._port} is running already")
        self.stop()  # A server that died may have left other processes of its group.
        has_experts, is_fp8 = self._look_at_model()
        self._check_role(has_experts=has_experts)
        _check_port(self._host, self._port)
        _check_memory()
        self._folder.mkdir(parents=True, exist_ok=True)
        # Reading os.environ is allowed here: a child inherits its parent's environment.
        inherited = os.environ if self._inherited is None else self._inherited  # noqa: TID251
        if self._options.has_gpu:
            inherited = {**inherited, **_toolkit(inherited)}
        else:
            # On a GPU SGLang keeps kernels there, which later engines would compile again.
            self._temporary = make_temporary()
            inherited = {**inherited, "TMPDIR": str(self._temporary)}
        command = command_line(
            self._options,
            model_path=self._model_path,
            host=self._host,
            port=self._port,
            has_experts=has_experts,
            has_fp8_blocks=is_fp8,
        )
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(
                    self._options,
                    inherited,
                    pid=os.getpid(),
                    weight_bytes=_weight_bytes(Path(self._model_path)),
                    has_fp8_blocks=is_fp8,
                ),
                # Not a session: Linux shares the CPU by session first (autogroup), and beside
                # engines with one each all else waits for seconds for a core.
                process_group=0,
            )

    def is_running(self) -> bool:
        """Whether the server's main process lives."""
        return self._process is not None and self._process.poll() is None

    def answers(self) -> bool:
        """Whether the server answers a health check within 5 s. Blocks."""
        return _answers(self.url + "/health")

    def wait_healthy(self, *, timeout_s: float = 600.0, progress: Progress | None = None) -> float:
        """Wait until /health answers; returns the seconds waited.

        Takes 12-155 s on two CPU cores, by what else they do; most of it is imports.

        Args:
            timeout_s: Without the time that the weights' bytes take at `WEIGHT_BYTES_PER_S_MIN`.
            progress: Told how it goes.

        Raises:
            EngineServerError: the server ended, or did not answer in time.
        """
        timeout_s = with_reading(timeout_s, weight_bytes=_weight_bytes(Path(self._model_path)))
        started_s = time.monotonic()
        reported_s = started_s
        while True:
            waited_s = time.monotonic() - started_s
            if self._process is None or self._process.poll() is not None:
                code = self._process.returncode if self._process else None
                raise self._error(f"ended with status {code} after {waited_s:.0f} s")
            if self.answers():
                self._shared = shared_files_of(self._process.pid)
                return waited_s
            if waited_s > timeout_s:
                raise self._error(f"did not answer /health within {timeout_s:.0f} s")
            if progress and time.monotonic() - reported_s >= _PROGRESS_EVERY_S:
                reported_s = time.monotonic()
                progress(waited_s, (self.log_tail(lines_max=1) or [""])[0])
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the whole process group; idempotent.

        It is killed at once: SGLang checks for a request to end every 5 s only, and an engine holds
        nothing that a kill could lose.

        Raises:
            EngineServerError: a process of the group is still alive.
        """
        process, self._process = self._process, None
        if process is None:
            return
        # If it has died, it no longer says which files it had when it answered first.
        shared = self._shared | shared_files_of(process.pid)
        temporary, self._temporary = self._temporary, None
        _signal_group(process.pid, signal.SIGKILL)
        is_gone = _wait_gone(process, timeout_s=_KILLED_WITHIN_S)
        remove_left_files(shared, temporary)
        if not is_gone:
            # Without a member it is the process itself, which has not given back its memory yet.
            left = sorted(pids_of_group(process.pid)) or [process.pid]
            raise EngineServerError(f"processes {left} of the engine survived SIGKILL")

    def log_tail(self, *, lines_max: int = LOG_TAIL_LINES) -> list[str]:
        """The log's last lines without blank ones, oldest first."""
        if not self.log_path.exists():
            return []
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-lines_max:]

    def __enter__(self) -> "EngineServer":
        """Start and wait until healthy."""
        self.start()
        try:
            self.wait_healthy()
        except BaseException:
            # Also on an interrupt while it loads: `__exit__` is not called if this raises.
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop."""
        self.stop()

    def _check_role(self, *, has_experts: bool) -> None:
        role = self._options.role
        if role == "unified":
            return
        if has_experts:
            raise EngineServerError(
                f"a {role} engine cannot serve a mixture of experts: {EXPERTS_REFUSAL}"
            )
        has_gpu = self._options.has_gpu
        if lacks := missing_on_gpu(self._options.extra) if has_gpu else missing_on_cpu():
            place = "GPUs" if has_gpu else "a CPU"
            raise EngineServerError(f"a {role} engine on {place} needs {lacks}")

    def _look_at_model(self) -> tuple[bool, bool]:
        """Whether it is a mixture of experts, and whether its weights are in fp8 blocks."""
        path = Path(self._model_path) / "config.json"
        if not path.is_file():
            raise EngineServerError(f"no model at {self._model_path}: config.json is missing")
        try:
            config = path.read_bytes()
            return is_mixture(config), has_fp8_blocks(config)
        except msgspec.MsgspecError as error:
            raise EngineServerError(f"no model at {self._model_path}: {path}: {error}") from error

    def _error(self, what: str) -> EngineServerError:
        tail = "\n".join(line[:_LOG_LINE_CHARACTERS_MAX] for line in self.log_tail())
        return EngineServerError(
            f"the engine on port {self._port} {what}; {self.log_path}:\n{tail}"
        )


def with_reading(timeout_s: float, *, weight_bytes: int) -> float:
    """The longest start of an engine with so many bytes of weights, seconds."""
    return timeout_s + weight_bytes / WEIGHT_BYTES_PER_S_MIN


def _toolkit(inherited: Mapping[str, str]) -> dict[str, str]:
    try:
        return toolkit_environment(inherited)
    except ToolkitError as error:
        raise EngineServerError(str(error)) from error


def _weight_bytes(model: Path) -> int:
    """Bytes of the weights in a folder of Hugging Face format."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _wait_gone(process: "subprocess.Popen[bytes]", *, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None or pids_of_group(process.pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_GONE_POLL_S)
    return True


def _check_memory() -> None:
    available_bytes = available_memory_bytes()
    if available_bytes < MEMORY_BYTES_MIN:
        raise EngineServerError(
            f"an engine needs about {MEMORY_BYTES_MIN / 2**30:.0f} GB of free memory, "
            f"{available_bytes / 2**30:.1f} GB are there"
        )


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineServerError(
                f"port {port} of {host} cannot be used: {error.strerror}"
            ) from error


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
