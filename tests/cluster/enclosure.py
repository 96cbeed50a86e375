"""Namespaces of their own for the processes of a node.

Interfaces, rules, mounts and processes in them are gone when their first process ends, and that one
ends with the process that made it, however that ends.
"""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from msgspec import Struct

ADDRESS = "10.245.0.1"
"""Of the node, on its loopback interface: pods reach it through their default route."""

PRIVATE = ("/run", "/var/log", "/var/lib/cni")
"""Folders in which a runtime, a kubelet and network plug-ins write; inside each is an empty one."""

KERNEL = {
    "kernel/keys/root_maxbytes": "25000000",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
}
"""What a kubelet sets for a whole machine: it finds these values, and the machine keeps its own."""

ENTER = "nsenter"
_FLAGS = ("--mount", "--net", "--pid", "--ipc", "--uts")
_FIRST = ("bash", "-c", "sleep infinity & wait")
"""A shell that waits also collects the processes that lost their parent."""

_STOP_S = 20.0


class Enclosure(Struct, frozen=True):
    """Namespaces of a node that is up.

    Attributes:
        first_id: Process id of their first process.
    """

    first_id: int

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs this one in them."""
        return [ENTER, f"--target={self.first_id}", *_FLAGS, "--", *command]

    def run(self, *command: str, given: bytes = b"") -> str:
        """Run a command to its end; returns what it printed.

        Raises:
            RuntimeError: it failed; the text has what it printed.
        """
        done = subprocess.run(
            self.inside(command), input=given, capture_output=True, check=False, timeout=600
        )
        if done.returncode != 0:
            printed = (done.stderr + done.stdout).decode()
            raise RuntimeError(f"{' '.join(command)}: {done.returncode} {printed}")
        return done.stdout.decode()

    @contextmanager
    def running(self, command: Sequence[str], *, log: Path) -> Iterator[None]:
        """This command runs in them during the block."""
        with running(self.inside(command), log=log):
            yield


@contextmanager
def running(command: Sequence[str], *, log: Path) -> Iterator[None]:
    """This command runs during the block; at its end it is asked to stop, then killed."""
    with log.open("ab") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield
        finally:
            # What enters namespaces waits for its child, and hands no signal on.
            found = psutil.Process(process.pid).children() if command[0] == ENTER else []
            for each in found or [process]:
                each.terminate()
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def enclosure(folder: Path) -> Iterator[Enclosure]:
    """New namespaces, with `folder` for files that they need."""
    made = [path for path in map(Path, PRIVATE) if not path.exists()]
    for path in made:
        path.mkdir()
    command = ["setpriv", "--pdeathsig=KILL", "unshare", *_FLAGS, "--mount-proc"]
    command += ["--fork", "--kill-child=KILL", *_FIRST]
    with subprocess.Popen(command) as unshare:
        try:
            inside = Enclosure(_first_process(unshare))
            _furnish(inside, folder)
            yield inside
        finally:
            unshare.kill()
            for path in made:
                path.rmdir()


def _first_process(unshare: "subprocess.Popen[bytes]") -> int:
    process = psutil.Process(unshare.pid)
    while not (children := process.children()) or children[0].name() != _FIRST[0]:
        assert unshare.poll() is None, "this machine gives no namespaces"
        time.sleep(0.02)
    return int(children[0].pid)


def _furnish(inside: Enclosure, folder: Path) -> None:
    inside.run("ip", "link", "set", "lo", "up")
    inside.run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
    for path in PRIVATE:
        inside.run("mount", "-t", "tmpfs", "tmpfs", path)
    for name, value in KERNEL.items():
        file = folder / name.replace("/", ".")
        file.write_text(f"{value}\n")
        inside.run("mount", "--bind", str(file), f"/proc/sys/{name}")
