"""Gives the pods of a run back to the Kubernetes cluster in which this process runs."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import msgspec

from forgemq_launcher.core.workloads import GROUP_VERSIONS, SCALED_OBJECTS, Workload
from forgemq_settings.environment import SettingsError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a pod's token, namespace and the certificate of the API."""
REQUEST_TIMEOUT_S = 30.0
"""An API server answers a patch within a second; one that restarts takes longer than this."""

_PAUSED = "autoscaling.keda.sh/paused-replicas"


class ClusterError(OSError):
    """The API server does not answer, or refuses a change; the text says which."""


class Cluster(NamedTuple):
    """The API of the cluster, and who asks."""

    url: str
    namespace: str
    token_file: str
    """Read for each request: the token of a pod is valid for an hour, and renewed in its file."""
    ca_file: str = ""
    """Certificate that the API server must have; '' for an address without TLS."""

    def release(self, workload: Workload) -> None:
        """Have no pod of this workload; one that KEDA scales stays so until it is `resume`d.

        Raises:
            ClusterError: see there.
        """
        if workload.kind == SCALED_OBJECTS:
            self._patch(workload, {"metadata": {"annotations": {_PAUSED: "0"}}})
        else:
            self._patch(workload, {"spec": {"replicas": 0}}, subresource="/scale")

    def resume(self, workload: Workload) -> None:
        """Let KEDA scale this workload again; one of another kind stays as it is.

        Raises:
            ClusterError: see there.
        """
        if workload.kind == SCALED_OBJECTS:
            self._patch(workload, {"metadata": {"annotations": {_PAUSED: None}}})

    def _patch(
        self, workload: Workload, change: Mapping[str, object], *, subresource: str = ""
    ) -> None:
        path = (
            f"/apis/{GROUP_VERSIONS[workload.kind]}/namespaces/{self.namespace}"
            f"/{workload.kind}/{workload.name}{subresource}"
        )
        request = Request(
            self.url + path,
            data=msgspec.json.encode(change),
            method="PATCH",
            headers={
                "Authorization": f"Bearer {Path(self.token_file).read_text().strip()}",
                "Content-Type": "application/merge-patch+json",
            },
        )
        checked = ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None
        try:
            with urlopen(request, timeout=REQUEST_TIMEOUT_S, context=checked) as reply:
                reply.read()
        except HTTPError as error:
            raise ClusterError(f"{path}: {error.code} {error.read().decode()[:300]}") from error
        except (URLError, TimeoutError) as error:
            raise ClusterError(f"{self.url} does not answer: {error}") from error


def own_cluster(environ: Mapping[str, str], *, account: Path = ACCOUNT) -> Cluster:
    """The cluster of the pod in which this process runs.

    Raises:
        SettingsError: this process runs in no pod with an account.
    """
    host, port = (environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not (account / "token").is_file():
        raise SettingsError("--release: only a pod with an account of its cluster can release pods")
    host = f"[{host}]" if ":" in host else host
    return Cluster(
        url=f"https://{host}:{port}",
        namespace=(account / "namespace").read_text().strip(),
        token_file=str(account / "token"),
        ca_file=str(account / "ca.crt"),
    )
