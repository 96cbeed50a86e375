"""An overlay's objects in a node's cluster: what happens to them, and what a person would ask."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from tests.cluster.local_overlay import NAMESPACE, STEPS
from tests.cluster.node import Node

POLL_S = 2.0
CONNECTED_WITHIN_S = 5.0
ROLLED_WITHIN_S = 900
"""An engine starts within a minute on idle cores."""
STEP_WITHIN_S = 1800.0
"""Also the first one, for which everything starts, on a machine with other work."""


class Pod(Struct, frozen=True, kw_only=True):
    """A pod that the API has.

    Attributes:
        workload: By its label app.kubernetes.io/name.
        restarts: Of each container that started again by itself.
        failed: Containers whose last end was not with status 0.
    """

    uid: str
    workload: str
    restarts: dict[str, int]
    failed: list[str]


class ClusterRun:
    """An overlay's run."""

    def __init__(self, node: Node) -> None:
        """The node's cluster has the overlay's objects, or will have."""
        self._node = node

    def apply(self, objects: Sequence[dict]) -> None:
        """Apply these objects; AssertionError if the API refuses one, or warns."""
        applied = self._node.api.apply(objects)
        assert (applied.returncode, applied.stderr) == (0, "")

    def kubectl(self, *arguments: str) -> str:
        """What kubectl prints in the run's namespace; AssertionError if it fails."""
        done = self._node.api.kubectl(f"--namespace={NAMESPACE}", *arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout

    def items(self, kinds: str) -> list[dict[str, Any]]:
        """Every object of these kinds."""
        return list(json.loads(self.kubectl("get", kinds, "--output=json"))["items"])

    def pods(self) -> dict[str, Pod]:
        """Every pod by name, but those that are about to end."""
        return {
            each["metadata"]["name"]: _pod(each)
            for each in self.items("pods")
            if "deletionTimestamp" not in each["metadata"]
        }

    def generations(self) -> dict[str, int]:
        """How often the wanted state of each workload changed."""
        found = self.items("deployments,statefulsets")
        return {each["metadata"]["name"]: each["metadata"]["generation"] for each in found}

    def wait_rolled(self, *workloads: str) -> None:
        """Return once these workloads have all their pods ready, of the newest kind."""
        for each in workloads:
            self.kubectl("rollout", "status", each, f"--timeout={ROLLED_WITHIN_S}s")

    def delete_pods(self, workload: str) -> None:
        """Delete the pods of a workload, and wait until others are ready in their place."""
        before = set(self.uids(workload))
        with self.timed(f"delete {workload}"):
            name = workload.partition("/")[2]
            self.kubectl("delete", "pods", f"--selector=app.kubernetes.io/name={name}")
            self.wait_rolled(workload)
        assert not before & set(self.uids(workload))

    def uids(self, workload: str) -> list[str]:
        """Ids of the workload's pods, which differ for each pod that was ever made."""
        name = workload.partition("/")[2]
        return [pod.uid for pod in self.pods().values() if pod.workload == name]

    def change(self, name: str, *arguments: str, rolled: Sequence[str]) -> None:
        """Run kubectl, and wait until these workloads have the pods that it asked for."""
        with self.timed(name):
            self.kubectl(*arguments)
            self.wait_rolled(*rolled)

    def wait_for_step(self, step: int) -> None:
        """Return once the trainer that runs now reported this step, or a later one."""
        wait_until(lambda: self.newest_step() >= step, f"step {step}", within_s=STEP_WITHIN_S)

    def newest_step(self) -> int:
        """By the log of the trainer's pod; -1 before the first, and while there is no pod."""
        logs = self._node.api.kubectl(f"--namespace={NAMESPACE}", "logs", "trainer-0")
        lines = [line for line in logs.stdout.splitlines() if line.startswith("{")]
        events = [json.loads(line) for line in lines]
        return max((each["step"] for each in events if each["event"] == "trained"), default=-1)

    def pod_of(self, workload: str) -> str:
        """Name of the one pod of a workload."""
        (name,) = [name for name, pod in self.pods().items() if pod.workload == workload]
        return name

    def reaches(self, workload: str, address: str) -> bool:
        """Whether one of a workload's pods can open a connection to this host and port."""
        host, _, port = address.partition(":")
        code = f"import socket; socket.create_connection(({host!r}, {port}), {CONNECTED_WITHIN_S})"
        pod = min(name for name, pod in self.pods().items() if pod.workload == workload)
        command = ("exec", pod, "--", "/venv/bin/python", "-c", code)
        done = self._node.api.kubectl(f"--namespace={NAMESPACE}", *command)
        refused = ("ConnectionRefusedError", "TimeoutError")
        assert done.returncode == 0 or any(each in done.stderr for each in refused), done.stderr
        return done.returncode == 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Say how long the block took."""
        began_s = time.monotonic()
        yield
        sys.stderr.write(f"{name}: {time.monotonic() - began_s:.0f} s\n")


def _pod(item: dict[str, Any]) -> Pod:
    statuses = item["status"].get("containerStatuses", ())
    return Pod(
        uid=item["metadata"]["uid"],
        workload=item["metadata"]["labels"]["app.kubernetes.io/name"],
        restarts={each["name"]: each["restartCount"] for each in statuses if each["restartCount"]},
        failed=[
            each["name"]
            for each in statuses
            if each["lastState"].get("terminated", {}).get("exitCode", 0)
        ],
    )


def wait_until(holds: Callable[[], bool], what: str, *, within_s: float) -> None:
    """Return once it holds; AssertionError if it takes too long."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"no {what} within {within_s:g} s"
        time.sleep(POLL_S)


def last_step() -> int:
    """Number of the run's last step."""
    return STEPS - 1
