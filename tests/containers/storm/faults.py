"""Lets a fault of a schedule happen to the running pods, and undoes it."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator

from docker.models.containers import Container as Running

from tests.containers.pods import POLL_S, Pod, PodRunner, wait_for_end
from tests.containers.storm.schedule import BROKER, Fault
from tests.containers.storm.small_disk import SmallDisk
from tests.containers.storm.stepped_clock import SteppedClock

UP_S_MAX = 180
"""Until a container runs that failed before: the engine of containers waits up to a minute."""

ENDED_S_MAX = 30
"""After SIGKILL, on a machine with other work."""

AFTER_STEP_BACK_S = 5
"""Time in which a process runs with a clock that has jumped back."""


class Faults:
    """What can happen to the pods of a runner.

    Args:
        disk: On which the broker keeps its records.
        clock: The wall clock of the one container whose clock may be stepped.
    """

    def __init__(self, runner: PodRunner, *, disk: SmallDisk, clock: SteppedClock) -> None:
        self._runner = runner
        self._disk = disk
        self._clock = clock

    def play(self, fault: Fault) -> None:
        """Let it happen for its time; everything is as before then, but for what it caused."""
        match fault.kind:
            case "kill":
                self._kill(fault.whom, down_s=fault.for_s)
            case "pause":
                self._pause(fault)
            case "cut":
                with self._cut(self._pod(fault.whom), self._pod(fault.other)):
                    time.sleep(fault.for_s)
            case "disconnect":
                self._disconnect(fault)
            case "full_disk":
                self._fill(fault)
            case "clock_step":
                self._step(fault)

    def _pod(self, name: str) -> Pod:
        return self._runner.pods[name.split("/")[0]]

    def _container(self, name: str) -> Running:
        return self._pod(name).containers[name.split("/")[1]]

    def _kill(self, name: str, *, down_s: float = 0.0) -> None:
        """Kill the container if it runs, and start it again."""
        container = self._container(name)
        if not is_up(container):
            return
        container.kill("SIGKILL")
        wait_for_end(container, timeout_s=ENDED_S_MAX)
        time.sleep(down_s)
        container.start()

    def _pause(self, fault: Fault) -> None:
        """Freeze all its processes: they get no signal and notice nothing."""
        container = self._container(fault.whom)
        if not is_up(container):
            return
        container.pause()
        try:
            time.sleep(fault.for_s)
        finally:
            container.unpause()

    @contextlib.contextmanager
    def _cut(self, one: Pod, other: Pod) -> Iterator[None]:
        """Drop all packets between the two; neither side gets an error."""
        rules = (["INPUT", "--source", other.address], ["OUTPUT", "--destination", other.address])
        for rule in rules:
            in_network_of(one, "iptables", "--append", *rule, "--jump", "DROP")
        try:
            yield
        finally:
            for rule in rules:
                in_network_of(one, "iptables", "--delete", *rule, "--jump", "DROP")

    def _disconnect(self, fault: Fault) -> None:
        """Take the network from a pod, and give it back with the same address and names."""
        pod, network = self._pod(fault.whom), self._runner.network
        network.disconnect(pod.sandbox)
        try:
            time.sleep(fault.for_s)
        finally:
            network.connect(pod.sandbox, aliases=list(pod.aliases), ipv4_address=pod.address)

    def _fill(self, fault: Fault) -> None:
        self._disk.fill()
        try:
            time.sleep(fault.for_s)
        finally:
            self._disk.free()
        assert is_up(self._container(BROKER)), "the broker does not start on a disk with room"

    def _step(self, fault: Fault) -> None:
        """Step the clock under a running process, start one with it, and the same way back."""
        try:
            self._clock.step(fault.step_s)
            time.sleep(fault.for_s)
            self._kill(fault.whom)
            time.sleep(fault.for_s)
        finally:
            self._clock.step(0)
        time.sleep(AFTER_STEP_BACK_S)
        self._kill(fault.whom)


def in_network_of(pod: Pod, *command: str) -> None:
    """Run a program of this machine in a pod's network; needs root."""
    pid = pod.sandbox.attrs["State"]["Pid"]
    subprocess.run(["nsenter", f"--target={pid}", "--net", *command], check=True)


def is_up(container: Running) -> bool:
    """Wait until it runs; False if it has ended for good."""
    found = ""

    def is_settled() -> bool:
        nonlocal found
        container.reload()
        found = container.status
        return found in {"running", "exited"}

    until(is_settled, timeout_s=UP_S_MAX)
    return found == "running"


def until(is_so: Callable[[], bool], *, timeout_s: float) -> None:
    """Return when it is so; AssertionError if that takes longer."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"still waiting after {timeout_s:g} s"
        time.sleep(POLL_S)
