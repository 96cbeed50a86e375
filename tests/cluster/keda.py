"""KEDA beside an API server, with Kubernetes' autoscaler."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from forgemq_settings.ports import free_port
from tests.certificates import authority
from tests.cluster.api_server import ApiServer
from tests.cluster.enclosure import running
from tests.cluster.go_modules import KEDA
from tests.cluster.programs import NODE, missing_for_server, program

OPERATOR, METRICS_SERVER = KEDA.packages
NAMESPACE = "keda"
METRICS = "external.metrics.k8s.io"
_METRICS_FOR_ALL = f"""
apiVersion: v1
kind: Namespace
metadata: {{name: {NAMESPACE}}}
---
apiVersion: v1
kind: Service
metadata: {{name: metrics, namespace: {NAMESPACE}}}
spec: {{type: ExternalName, externalName: localhost}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: metrics}}
rules:
  - {{apiGroups: [{METRICS}], resources: ["*"], verbs: [get, list]}}
  - {{nonResourceURLs: ["/apis/{METRICS}*"], verbs: [get]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: metrics}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: metrics}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:unauthenticated"}}]
"""
"""The API server has no certificate by which the metrics server could tell who asks it."""


def missing_for_keda() -> str:
    """Why it cannot run here, in one line; '' if it can."""
    if lacks := missing_for_server():
        return lacks
    is_there = KEDA.is_compiled() and program(NODE).is_file()
    return "" if is_there else "make test-cluster compiles KEDA and Kubernetes first"


@contextmanager
def running_keda(api: ApiServer, folder: Path) -> Iterator[None]:
    """Operator, metrics server and Kubernetes' autoscaler run during the block; logs in `folder`.

    The cluster has no other controllers: an autoscaler writes how many pods it wants into
    a Deployment, and nobody makes them.
    """
    kinds = sorted((KEDA.source() / "config/crd/bases").glob("*.yaml"))
    for each in kinds:
        made = api.kubectl("apply", "--server-side", "-f", str(each))
        assert made.returncode == 0, made.stderr
    api.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    _write_certificates(folder)
    inner, port = free_port(), free_port()
    objects = [*yaml.safe_load_all(_METRICS_FOR_ALL), _metrics_service(port)]
    made = api.apply(objects)
    assert made.returncode == 0, made.stderr
    commands = _commands(api, folder, inner=inner, port=port)
    with ExitStack() as stack:
        for name, command in commands.items():
            stack.enter_context(running(command, log=folder / f"{name}.log"))
        yield


def _write_certificates(folder: Path) -> None:
    ca = authority()
    key, certificate = ca.server()
    ca.write(folder / "ca.crt")
    (folder / "tls.key").write_bytes(key)
    (folder / "tls.crt").write_bytes(certificate)


def _metrics_service(port: int) -> dict[str, object]:
    """By which the API server hands questions for metrics on."""
    service = {"name": "metrics", "namespace": NAMESPACE, "port": port}
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"v1beta1.{METRICS}"},
        "spec": {
            "service": service,
            "group": METRICS,
            "version": "v1beta1",
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }


def _commands(api: ApiServer, folder: Path, *, inner: int, port: int) -> dict[str, list[str]]:
    """By name; `inner` is where the metrics server asks the operator."""
    settings = [f"KUBECONFIG={api.kubeconfig}", "WATCH_NAMESPACE="]
    settings += [f"{kind}_NAMESPACE={NAMESPACE}" for kind in ("POD", "KEDA_CLUSTER_OBJECT")]
    access = [f"--{kind}-kubeconfig={api.kubeconfig}" for kind in ("authentication", "lister")]
    access += [f"--authorization-kubeconfig={api.kubeconfig}", "--authentication-skip-lookup"]
    return {
        "operator": [
            *("env", *settings, str(KEDA.program(OPERATOR))),
            *(f"--cert-dir={folder}", f"--metrics-service-bind-address=127.0.0.1:{inner}"),
            *("--enable-prometheus-metrics=false", "--health-probe-bind-address=0"),
        ],
        "metrics": [
            *("env", *settings, str(KEDA.program(METRICS_SERVER))),
            *(f"--cert-dir={folder}", f"--metrics-service-address=127.0.0.1:{inner}"),
            *("--bind-address=127.0.0.1", f"--secure-port={port}", f"--port={free_port()}"),
            *(f"--tls-cert-file={folder / 'tls.crt'}", *access),
            f"--tls-private-key-file={folder / 'tls.key'}",
        ],
        "autoscaler": [
            *(str(program(NODE)), "kube-controller-manager", f"--kubeconfig={api.kubeconfig}"),
            *("--leader-elect=false", "--bind-address=127.0.0.1", f"--secure-port={free_port()}"),
            "--controllers=horizontal-pod-autoscaler-controller",
            "--horizontal-pod-autoscaler-sync-period=1s",
        ],
    }
