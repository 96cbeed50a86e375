"""The cluster of one node itself, with pods that hold nothing but their namespaces."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import docker
import pytest
import yaml

from tests.cluster.cgroups import NAME as GROUP
from tests.cluster.cgroups import hierarchies
from tests.cluster.enclosure import ADDRESS
from tests.cluster.node import MEMORY_BYTES, NAME, Node
from tests.cluster.programs import PAUSE, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SAFE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
DOCKERFILE = "FROM scratch\nCOPY pause /lower\nCOPY pause /upper\n"
"""Each line that copies makes a layer."""


def pod(name: str, containers: Sequence[dict]) -> dict:
    """A pod of the standard `restricted` with these containers."""
    seccomp = {"type": "RuntimeDefault"}
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": seccomp}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"securityContext": security, "containers": list(containers)},
    }


@pytest.fixture
def namespace(cluster_node: Node) -> Iterator[str]:
    """A namespace that enforces the standard."""
    api, name = cluster_node.api, "restricted"
    api.kubectl("create", "namespace", name)
    api.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    gone = api.kubectl("delete", "namespace", name, "--timeout=60s")
    assert gone.returncode == 0, gone.stderr


def start(node: Node, namespace: str, wanted: dict) -> None:
    """Create the pod, and return once it is ready."""
    given = yaml.safe_dump(wanted)
    made = node.api.kubectl("create", f"--namespace={namespace}", "-f", "-", given=given)
    assert made.returncode == 0, made.stderr
    named = f"pod/{wanted['metadata']['name']}"
    ready = node.api.kubectl(
        "wait", f"--namespace={namespace}", "--for=condition=Ready", named, "--timeout=120s"
    )
    assert ready.returncode == 0, node.api.kubectl("describe", "-n", namespace, named).stdout


def test_a_pod_of_the_restricted_standard_runs_and_another_is_refused(
    cluster_node: Node, namespace: str
):
    idle = {"name": "pause", "image": "forgemq-test/pause:1", "securityContext": SAFE}
    start(cluster_node, namespace, pod("idle", [idle]))
    worse = pod("worse", [idle | {"securityContext": SAFE | {"allowPrivilegeEscalation": True}}])
    refused = cluster_node.api.kubectl(
        "create", f"--namespace={namespace}", "-f", "-", given=yaml.safe_dump(worse)
    )
    assert 'violates PodSecurity "restricted' in refused.stderr


def test_an_image_of_the_docker_engine_runs_with_the_files_of_all_its_layers(
    cluster_node: Node, namespace: str, tmp_path: Path
):
    shutil.copy(program(PAUSE), tmp_path / "pause")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    client = docker.from_env(timeout=60)
    built, _ = client.images.build(path=str(tmp_path))
    try:
        name = "forgemq-test/layers:1"
        cluster_node.images.show(built.id, names=[f"docker.io/{name}"], client=client)
        each = {"image": name, "securityContext": SAFE}
        containers = [each | {"name": one, "command": [f"/{one}"]} for one in ("lower", "upper")]
        start(cluster_node, namespace, pod("layers", containers))
    finally:
        client.images.remove(built.id, force=True)
        client.close()


def test_pods_cannot_take_more_memory_than_the_node_offers(cluster_node: Node):
    limits = [
        int(file.read_text())
        for root in hierarchies()
        for name in ("memory.limit_in_bytes", "memory.max")
        if (file := root / GROUP / "kubepods" / name).is_file()
    ]
    assert limits == [min(limits)]
    assert limits[0] <= MEMORY_BYTES + 2**30


def test_the_machine_gets_no_address_rule_or_mount_of_the_node(cluster_node: Node):
    """What the node makes of them is in its own namespaces."""
    links = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True)
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True)
    mounts = Path("/proc/self/mounts").read_text()
    assert ADDRESS not in links.stdout
    assert "KUBE-" not in rules.stdout
    assert str(cluster_node.folder) not in mounts
    assert cluster_node.api.kubectl("get", "node", NAME).returncode == 0
