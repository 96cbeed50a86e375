"""Programs of Kubernetes, compiled from its Go modules.

`python -m tests.cluster.programs kube_apiserver` compiles the API server if it is not there, and
`python -m tests.cluster.programs node` all that a node runs. The first time the one takes about 15
minutes of one core, the other about 20, and both 1 GB of Go's downloads. Nothing is installed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.docker_layers import DRIVER
from tests.docker_engine import HOW_TO, docker_answers

VERSION = "v1.34.4"
SOURCE = Path(__file__).parent / "kubernetes"
FOLDER = Path(__file__).parents[2] / ".cache/cluster"
PLUGINS = Path("/usr/lib/cni")
"""Where Debian's package of network plug-ins puts them."""

API_SERVER, NODE, PAUSE = "kube_apiserver", "node", "pause"
"""Packages in `SOURCE`."""

_SERVER_NEEDS = {
    "go": "Go 1.24 or later (https://go.dev/dl)",
    "etcd": "etcd (on Debian: apt-get install etcd-server)",
    "kubectl": "kubectl",
    "openssl": "openssl",
}
_NODE_NEEDS = _SERVER_NEEDS | {
    "containerd": "containerd",
    "runc": "runc",
    "dnsmasq": "dnsmasq (on Debian: apt-get install dnsmasq-base)",
    "ipset": "ipset",
    "iptables": "iptables",
    "ip": "iproute2",
    "unshare": "util-linux",
}


def program(package: str) -> Path:
    """Where the program of a package is, once it is compiled."""
    return FOLDER / f"{package.replace('_', '-')}-{VERSION}"


def server_command() -> list[str]:
    """The command of an API server: the node's program if it is there, since that is one too."""
    if program(NODE).is_file():
        return [str(program(NODE)), "kube-apiserver"]
    return [str(program(API_SERVER))]


def missing_for_server() -> str:
    """What this machine lacks for an API server, in one line; '' if nothing."""
    is_compiled = program(API_SERVER).is_file() or program(NODE).is_file()
    lacking = _lacking(_SERVER_NEEDS, is_compiled=is_compiled)
    return f"a Kubernetes API server needs {' and '.join(lacking)}" if lacking else ""


def missing_for_node() -> str:
    """What this machine lacks for a node that runs our images, in one line; '' if nothing."""
    lacking = [] if os.geteuid() == 0 else ["root"]
    lacking += _lacking(_NODE_NEEDS, is_compiled=program(NODE).is_file())
    if not (PLUGINS / "ptp").is_file():
        lacking.append("network plug-ins (on Debian: apt-get install containernetworking-plugins)")
    if not docker_answers():
        lacking.append(f"a Docker engine ({HOW_TO})")
    elif (driver := _storage_driver()) != DRIVER:
        lacking.append(f"a Docker engine with the storage driver {DRIVER} instead of {driver}")
    return f"a Kubernetes node needs {' and '.join(lacking)}" if lacking else ""


def _lacking(needed: Mapping[str, str], *, is_compiled: bool) -> list[str]:
    return [
        name
        for program, name in needed.items()
        if shutil.which(program) is None and not (program == "go" and is_compiled)
    ]


def _storage_driver() -> str:
    import docker

    client = docker.from_env()
    try:
        return str(client.info()["Driver"])
    finally:
        client.close()


def compile_program(package: str) -> None:
    """Put the program of this package where the tests look for it."""
    if program(package).is_file():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    major, minor, _ = VERSION.removeprefix("v").split(".")
    values = {"gitVersion": VERSION, "gitMajor": major, "gitMinor": minor}
    stamps = " ".join(f"-X k8s.io/component-base/version.{k}={v}" for k, v in values.items())
    flags = f"-s -w {stamps}"
    go_build(package, source=SOURCE, program=program(package), linked=flags)


def go_build(package: str, *, source: Path, program: Path, linked: str = "-s -w") -> None:
    """Compile a package below a module's folder; `linked` are the linker's flags."""
    subprocess.run(
        ["go", "build", "-trimpath", "-ldflags", linked, "-o", program, f"./{package}"],
        cwd=source,
        env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"},
        check=True,
    )


def main(package: str) -> None:
    """Compile what the tests with this package's program start, or say what is missing."""
    lacks = missing_for_node() if package == NODE else missing_for_server()
    if lacks:
        sys.exit(f"test-cluster: {lacks}")
    if package == NODE:
        compile_program(PAUSE)
    if package == NODE or not program(NODE).is_file():
        compile_program(package)


if __name__ == "__main__":
    main(sys.argv[1])
