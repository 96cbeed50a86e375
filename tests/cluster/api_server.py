"""A real Kubernetes API server with its own etcd."""

import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from forgemq_settings.ports import free_port
from tests.cluster.enclosure import ADDRESS, Enclosure, running
from tests.cluster.programs import server_command

READY_WITHIN_S = 180.0
"""It takes 4 s on an idle machine."""


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """An API server that is up.

    Attributes:
        url: Address of the API, with TLS.
        ca_file: Certificate of the server.
        kubeconfig: File by which its administrator calls it.
        account_key: Key by which it signs the tokens of service accounts.
        inside: Namespaces in which it listens; None: on this machine's loopback interface.
    """

    url: str
    ca_file: Path
    kubeconfig: Path
    account_key: Path
    inside: Enclosure | None = None

    def kubectl(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator; returns what it printed, whatever its status."""
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        return subprocess.run(
            self.inside.inside(command) if self.inside else command,
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
def api_server(folder: Path, *, inside: Enclosure | None = None) -> Iterator[ApiServer]:
    """An API server with an empty etcd in this folder, until the end of the block.

    It has no controllers: objects are admitted and kept, and no pod runs.
    """
    address = ADDRESS if inside else "127.0.0.1"
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
    server = [*server_command(), f"--etcd-servers={store}"]
    server += [f"--cert-dir={folder / 'certificates'}", f"--secure-port={port}"]
    server += [f"--bind-address={address}", f"--advertise-address={address}"]
    server += ["--authorization-mode=RBAC", f"--token-auth-file={folder / 'tokens.csv'}"]
    server += ["--service-cluster-ip-range=10.96.0.0/16", f"--service-account-key-file={key}"]
    server += ["--service-account-issuer=https://kubernetes.default.svc"]
    server += [f"--service-account-signing-key-file={key}", "--allow-privileged=true"]
    server += ["--kubelet-preferred-address-types=InternalIP"]
    api = ApiServer(
        url=f"https://{address}:{port}",
        ca_file=folder / "certificates/apiserver.crt",
        kubeconfig=folder / "kubeconfig",
        account_key=key,
        inside=inside,
    )
    api.kubeconfig.write_text(yaml.safe_dump(_kubeconfig(api.url, token=token)))
    with ExitStack() as stack:
        for name, command in (("etcd", etcd), ("server", server)):
            placed = inside.inside(command) if inside else command
            stack.enter_context(running(placed, log=folder / f"{name}.log"))
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


def _wait_ready(api: ApiServer, *, log: Path) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while api.kubectl("get", "--raw", "/readyz").stdout != "ok":
        assert time.monotonic() < deadline_s, log.read_text()[-2000:]
        time.sleep(0.5)
