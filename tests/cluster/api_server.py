"""A real Kubernetes API server with its own etcd, compiled from Kubernetes' Go modules.

`python -m tests.cluster.api_server` compiles it if it is not there: the first time that takes a
quarter of an hour of one core and 1 GB of Go's downloads. Nothing is installed.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.ports import free_port

VERSION = "v1.34.4"
SOURCE = Path(__file__).parent / "kube_apiserver"
PROGRAM = Path(__file__).parents[2] / f".cache/cluster/kube-apiserver-{VERSION}"
NEEDED = {
    "go": "Go 1.24 or later (https://go.dev/dl)",
    "etcd": "etcd (on Debian: apt-get install etcd-server)",
    "kubectl": "kubectl",
}
READY_WITHIN_S = 180.0
"""It takes 4 s on an idle machine."""


def missing() -> str:
    """What this machine lacks, in one line; '' if nothing."""
    lacking = [name for program, name in NEEDED.items() if shutil.which(program) is None]
    if PROGRAM.is_file():
        lacking = [name for name in lacking if name != NEEDED["go"]]
    return f"a Kubernetes API server needs {' and '.join(lacking)}" if lacking else ""


def compile_program() -> None:
    """Put the API server's program where the tests look for it."""
    if PROGRAM.is_file():
        return
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    major, minor, _ = VERSION.removeprefix("v").split(".")
    values = {"gitVersion": VERSION, "gitMajor": major, "gitMinor": minor}
    stamps = " ".join(f"-X k8s.io/component-base/version.{k}={v}" for k, v in values.items())
    subprocess.run(
        ["go", "build", "-trimpath", "-ldflags", f"-s -w {stamps}", "-o", str(PROGRAM), "."],
        cwd=SOURCE,
        env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"},
        check=True,
    )


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """One that is up.

    Attributes:
        url: Of the API, with TLS.
        ca_file: Its certificate.
        kubeconfig: By which its administrator calls it.
    """

    url: str
    ca_file: Path
    kubeconfig: Path

    def kubectl(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator; returns what it printed, whatever its status."""
        return subprocess.run(
            ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments],
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )

    def apply(self, objects: Sequence[dict]) -> subprocess.CompletedProcess[str]:
        """Apply these objects as the README says it."""
        return self.kubectl(
            "apply", "--server-side", "-f", "-", given=yaml.safe_dump_all(list(objects))
        )


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """An API server with an empty etcd in this folder, until the end of the block.

    It has no controllers: objects are admitted and kept, and no pod runs.
    """
    client, peer, port = (free_port() for _ in range(3))
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    key = folder / "account.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    store = f"http://127.0.0.1:{client}"
    here = f"http://127.0.0.1:{peer}"
    etcd = ["etcd", f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={store}"]
    etcd += [f"--advertise-client-urls={store}", f"--listen-peer-urls={here}"]
    etcd += [f"--initial-advertise-peer-urls={here}", f"--initial-cluster=default={here}"]
    server = [str(PROGRAM), f"--etcd-servers={store}", f"--cert-dir={folder / 'certificates'}"]
    server += [f"--secure-port={port}", "--bind-address=127.0.0.1", "--authorization-mode=RBAC"]
    server += [f"--token-auth-file={folder / 'tokens.csv'}", "--allow-privileged=true"]
    server += ["--service-cluster-ip-range=10.96.0.0/16", f"--service-account-key-file={key}"]
    server += ["--service-account-issuer=https://kubernetes.default.svc"]
    server += [f"--service-account-signing-key-file={key}", "--advertise-address=127.0.0.1"]
    api = ApiServer(
        url=f"https://127.0.0.1:{port}",
        ca_file=folder / "certificates/apiserver.crt",
        kubeconfig=folder / "kubeconfig",
    )
    api.kubeconfig.write_text(yaml.safe_dump(_kubeconfig(api.url, token=token)))
    with ExitStack() as stack:
        for name, command in (("etcd", etcd), ("server", server)):
            stack.enter_context(_running(command, log=folder / f"{name}.log"))
        _wait_ready(api, log=folder / "server.log")
        yield api


def _kubeconfig(url: str, *, token: str) -> dict[str, object]:
    cluster = {"server": url, "insecure-skip-tls-verify": True}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


@contextmanager
def _running(command: Sequence[str], *, log: Path) -> Iterator[None]:
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(api: ApiServer, *, log: Path) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while api.kubectl("get", "--raw", "/readyz").stdout != "ok":
        assert time.monotonic() < deadline_s, log.read_text()[-2000:]
        time.sleep(0.5)


if __name__ == "__main__":
    if lacks := missing():
        sys.exit(f"test-cluster-admission: {lacks}")
    compile_program()
