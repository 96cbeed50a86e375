"""A cluster of one node: control plane, containerd, kubelet and kube-proxy in namespaces of theirs.

It offers pods the cores of this machine, and the memory that overlays/local is made for. The kernel
holds pods to it, so that they take none from what else runs here.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import yaml
from msgspec import Struct

from tests.cluster.api_server import ApiServer, api_server
from tests.cluster.cgroups import node_group
from tests.cluster.docker_layers import Images
from tests.cluster.enclosure import ADDRESS, Enclosure, enclosure
from tests.cluster.go_modules import ROUTER
from tests.cluster.names import DOMAIN
from tests.cluster.programs import NODE, PAUSE, PLUGINS, program

NAME = "node1"
MEMORY_BYTES = 8 * 2**30
"""What pods may use together; it is what the README of deploy/kubernetes says of overlays/local."""

READY_WITHIN_S = 120.0
_PODS = "10.244.0.0/24"
_PAUSE_IMAGE = "docker.io/forgemq-test/pause:1"
_ROOT = Path(__file__).parents[2]


class Node(Struct, frozen=True):
    """A node that is ready.

    Attributes:
        api: Of its cluster.
        images: Its containerd has those that are shown to it.
        folder: Its own files.
        logs: One file for each program, and a folder `pods`.
    """

    api: ApiServer
    images: Images
    folder: Path
    logs: Path


@contextmanager
def node(folder: Path, *, logs: Path) -> Iterator[Node]:
    """A cluster in this empty folder, until the end of the block."""
    with ExitStack() as stack:
        group = stack.enter_context(node_group())
        inside = stack.enter_context(enclosure(folder))
        images = _containerd(folder, inside, stack, logs=logs)
        api = stack.enter_context(api_server(folder, inside=inside))
        for name, command in _programs(folder, api, group=group, logs=logs).items():
            stack.enter_context(inside.running(command, log=logs / f"{name}.log"))
        _wait_ready(api, log=logs / "kubelet.log")
        # It ends if it does not find its node.
        stack.enter_context(inside.running(_policies(api), log=logs / "policies.log"))
        yield Node(api, images, folder, logs)


def _containerd(folder: Path, inside: Enclosure, stack: ExitStack, *, logs: Path) -> Images:
    """Start a containerd; it has the image that holds a pod's namespaces."""
    socket = folder / "containerd.sock"
    plugins = folder / "plugins"
    plugins.mkdir()
    (plugins / "10-pods.conflist").write_text(json.dumps(_network(folder)))
    (folder / "containerd.toml").write_text(_containerd_settings(folder, socket))
    command = ["containerd", f"--config={folder / 'containerd.toml'}"]
    stack.enter_context(inside.running(command, log=logs / "containerd.log"))
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not socket.exists():
        assert time.monotonic() < deadline_s, (logs / "containerd.log").read_text()[-2000:]
        time.sleep(0.1)
    images = Images(inside, socket=socket)
    images.load_program(program(PAUSE), name=_PAUSE_IMAGE)
    return images


def _containerd_settings(folder: Path, socket: Path) -> str:
    # A root user without CAP_SYS_RESOURCE cannot lower the score by which the kernel frees memory.
    return f"""
version = 2
root = "{folder / "containerd"}"
state = "{folder / "state"}"
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder / "opt"}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{_PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{PLUGINS}"
    conf_dir = "{folder / "plugins"}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


def _network(folder: Path) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": str(folder / "addresses"),
        "ranges": [[{"subnet": _PODS}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    # A link for each pod: the kernel routes, and so rewrites, also what one pod sends to another.
    link = {"type": "ptp", "ipMasq": False, "ipam": addresses}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [link]}


def _programs(folder: Path, api: ApiServer, *, group: str, logs: Path) -> dict[str, list[str]]:
    """What runs beside the API server, by name, in the order in which it starts."""
    settings = {
        "kubelet": _kubelet_settings(folder, group=group, logs=logs),
        "proxy": _proxy_settings(api),
    }
    for name, values in settings.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    (folder / "resolv.conf").write_text("")
    one, access = str(program(NODE)), f"--kubeconfig={api.kubeconfig}"
    alone = [access, "--leader-elect=false"]
    account = [
        f"--service-account-private-key-file={api.account_key}",
        f"--root-ca-file={api.ca_file}",
    ]
    kubelet = [access, f"--config={folder / 'kubelet.yaml'}", f"--root-dir={folder / 'kubelet'}"]
    kubelet += [f"--cert-dir={folder / 'certificates'}"]
    names = [str(api.kubeconfig), str(api.ca_file), str(folder / "hosts"), ADDRESS]
    return {
        "controllers": [one, "kube-controller-manager", *alone, *account],
        "scheduler": [one, "kube-scheduler", *alone],
        "kubelet": [
            one,
            "kubelet",
            *kubelet,
            f"--hostname-override={NAME}",
            f"--node-ip={ADDRESS}",
        ],
        "proxy": [one, "kube-proxy", f"--config={folder / 'proxy.yaml'}"],
        "names": [
            "env",
            f"PYTHONPATH={_ROOT}",
            sys.executable,
            "-m",
            "tests.cluster.names",
            *names,
        ],
    }


def _policies(api: ApiServer) -> list[str]:
    """What enforces network policies."""
    parts = ["--run-firewall=true", "--run-router=false", "--run-service-proxy=false"]
    access = [f"--kubeconfig={api.kubeconfig}", f"--hostname-override={NAME}"]
    return [str(ROUTER.program("kube-router")), *access, *parts]


def _kubelet_settings(folder: Path, *, group: str, logs: Path) -> dict[str, object]:
    # Its port and that of the API server are in a network that nothing else is in.
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{group}",
        "clusterDNS": [ADDRESS],
        "clusterDomain": DOMAIN,
        "containerRuntimeEndpoint": f"unix://{folder / 'containerd.sock'}",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "failCgroupV1": False,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "podLogsDir": str(logs / "pods"),
        "resolvConf": str(folder / "resolv.conf"),
        "systemReserved": {"memory": str(reserved_bytes(psutil.virtual_memory().total))},
        "volumePluginDir": str(folder / "volume-plugins"),
    }


def reserved_bytes(total_bytes: int) -> int:
    """How much memory of a machine is left out, so that pods get `MEMORY_BYTES`."""
    return max(0, total_bytes - MEMORY_BYTES - 100 * 2**20)


def _proxy_settings(api: ApiServer) -> dict[str, object]:
    never = "0s"
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "bindAddress": ADDRESS,
        "clusterCIDR": _PODS,
        "clientConnection": {"kubeconfig": str(api.kubeconfig)},
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": never,
            "tcpCloseWaitTimeout": never,
        },
        "hostnameOverride": NAME,
    }


def _wait_ready(api: ApiServer, *, log: Path) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while "True" not in api.kubectl("get", f"node/{NAME}", "-o", f"jsonpath={_IS_READY}").stdout:
        assert time.monotonic() < deadline_s, log.read_text()[-3000:]
        time.sleep(0.5)


_IS_READY = '{.status.conditions[?(@.type=="Ready")].status}'
