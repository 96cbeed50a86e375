"""The production overlay's scaling by KEDA itself, on a real broker and a real Prometheus."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from msgspec import Struct

from forgemq_bus.broker import LocalBroker
from forgemq_bus.broker.local import folder_ports
from forgemq_bus.kafka import KafkaLog
from forgemq_bus.log import Emit, Place
from forgemq_contracts import topics
from forgemq_settings.ports import free_port
from forgemq_shell.connection import kafka_connection
from forgemq_telemetry.exporters import exporter_of
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import Telemetry
from tests.architecture.rendered import ROOT, manifests
from tests.certificates import authority
from tests.cluster.api_server import ApiServer, api_server
from tests.cluster.keda import METRICS, missing_for_keda, running_keda
from tests.dashboards import HOW_TO_GET_PROMETHEUS
from tests.integration.kafka_rights import bindings
from tests.integration.prometheus_program import running_prometheus
from tests.integration.test_secure_broker import secure_options

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OVERLAY = ROOT / "deploy/kubernetes/overlays/production"
RUN, NAMESPACE, USER, PASSWORD = "production", "forgemq", "forgemq-lag", "a pass,word"
BROKER = "forgemq-kafka-bootstrap.forgemq.svc:9093"
PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
SCALED = ("agents", "merger", "reward")
WRITTEN = {topics.FINISHED_EPISODES.name: 100, topics.SCORED_GROUPS.name: 40}
EPISODES_OPEN = 130
WITHIN_S = 90.0


class Broker(Struct, frozen=True):
    """One whose users have their rights, at `address`, with TLS; at `plain` all is allowed."""

    address: str
    plain: str
    ca: str


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("broker")
    ca = authority()
    keystore = folder / "broker.pem"
    keystore.write_bytes(b"".join(ca.server()))
    local = LocalBroker(folder, options=broker_options(folder, port := free_port(), keystore))
    try:
        plain = local.start()
        admin = AdminClient({"bootstrap.servers": plain})
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        login = UserScramCredentialUpsertion(USER, info, PASSWORD.encode())
        asked = admin.alter_user_scram_credentials([login]) | admin.create_acls(bindings(RUN))
        for future in asked.values():
            future.result(timeout=60)
        yield Broker(f"127.0.0.1:{port}", plain, ca.write(folder / "ca.pem").read_text())
    finally:
        local.stop()


def broker_options(folder: Path, port: int, keystore: Path) -> dict[str, str]:
    own = "listener.name.sasl_ssl"
    return {
        **secure_options(port, *folder_ports(folder / "ports.json"), keystore=keystore),
        f"{own}.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        f"{own}.scram-sha-512.sasl.jaas.config": "org.apache.kafka.common.security.scram."
        "ScramLoginModule required;",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that scrapes a gateway with open episodes, as a pod of the namespace."""
    if shutil.which("prometheus") is None:
        pytest.skip(HOW_TO_GET_PROMETHEUS)
    settings = TelemetrySettings(exporter="prometheus", port=0)
    exporter = exporter_of(settings, service="gateway", resource={})
    telemetry = Telemetry(service="gateway", exporter=exporter)
    telemetry.gauge("gateway.episodes_open", EPISODES_OPEN, domain="d")
    target = exporter.address.removeprefix("http://").partition("/")[0]
    pods = [{"targets": [target], "labels": {"run": NAMESPACE}}]
    scraped = [{"job_name": "gateway", "static_configs": pods}]
    configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": scraped}
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), configuration) as url:
        yield url
    exporter.close()


@pytest.fixture(scope="module")
def api(
    broker: Broker, prometheus: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    """The overlay's scaling is applied, with the addresses of this machine; KEDA runs."""
    if lacking := missing_for_keda():
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp("scaling")
    with api_server(folder) as server, running_keda(server, folder):
        made = server.apply(objects(broker, prometheus))
        assert (made.returncode, made.stderr) == (0, "")
        yield server


def objects(broker: Broker, prometheus: str) -> list[dict]:
    """What is scaled, its scaling, and all that KEDA reads for either."""
    kinds = ("Namespace", "ConfigMap", "ScaledObject", "TriggerAuthentication")
    of_overlay = [
        each
        for each in manifests(OVERLAY)
        if each["kind"] in kinds
        or (each["kind"] == "Deployment" and each["metadata"]["name"] in SCALED)
    ]
    text = json.dumps(of_overlay)
    for name, here in ((BROKER, broker.address), (PROMETHEUS, prometheus)):
        assert name in text
        text = text.replace(name, here)
    values = {USER: {"password": PASSWORD}, "forgemq-cluster-ca-cert": {"ca.crt": broker.ca}}
    return [*json.loads(text), *secrets(of_overlay, values)]


def secrets(of_overlay: list[dict], values: dict[str, dict[str, str]]) -> Iterator[dict]:
    """Those with these values, and those that the containers' variables name."""
    pods = [each["spec"]["template"]["spec"] for each in of_overlay if each["kind"] == "Deployment"]
    for container in (each for pod in pods for each in pod["containers"]):
        for variable in container["env"]:
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                values.setdefault(reference["name"], {})[reference["key"]] = "of no use here"
        for each in container.get("envFrom", ()):
            if reference := each.get("secretRef"):
                values.setdefault(reference["name"], {})
    for name, data in values.items():
        yield {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "stringData": data,
        }


def found(api: ApiServer, kind: str, name: str) -> dict:
    answer = api.kubectl("get", kind, name, f"--namespace={NAMESPACE}", "--output=json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def metric(api: ApiServer, name: str) -> int | None:
    """The number by which a workload is scaled; None while there is none."""
    names = found(api, "scaledobject", name).get("status", {}).get("externalMetricNames", ())
    path = f"/apis/{METRICS}/v1beta1/namespaces/{NAMESPACE}/{''.join(names)}"
    label = f"labelSelector=scaledobject.keda.sh%2Fname%3D{name}"
    answer = api.kubectl("get", "--raw", f"{path}?{label}")
    items = json.loads(answer.stdout)["items"] if names and answer.returncode == 0 else []
    return int(items[0]["value"]) if items else None


def wanted(api: ApiServer, name: str) -> int:
    return found(api, "deployment", name)["spec"]["replicas"]


def seen(api: ApiServer, expected: dict[str, tuple[int, int]]) -> dict[str, tuple]:
    """Metric and wanted pods of each workload, once they are as expected or after `WITHIN_S`."""
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        values = {name: (metric(api, name), wanted(api, name)) for name in expected}
        if values == expected or time.monotonic() > deadline_s:
            return values
        time.sleep(1.0)


async def test_keda_reads_the_lag_and_open_episodes_as_its_users_may_and_pods_follow(
    api: ApiServer, broker: Broker
) -> None:
    log = KafkaLog(kafka_connection({"FORGEMQ_KAFKA": broker.plain}), run=RUN)
    try:
        await log.create_topics(dict.fromkeys(WRITTEN, 2))
        writer = await log.writer()
        for topic, count in WRITTEN.items():
            records = [
                Emit(topic=topic, partition=n % 2, key=b"k", value=b"v") for n in range(count)
            ]
            await writer.write_all(records)
        behind = {"reward": (100, 2), "merger": (40, 3), "agents": (EPISODES_OPEN, 3)}
        assert seen(api, behind) == behind

        transactions = await log.transaction_writer("test")
        read = {Place(topics.FINISHED_EPISODES.name, number): 40 for number in range(2)}
        await transactions.commit(outputs=[], group="reward-grading", positions=read)
        nearly = {"reward": (20, 2)}
        assert seen(api, nearly) == nearly, "a pod is given up five minutes after it had no work"
    finally:
        await log.close()


def test_every_scaled_object_is_ready_and_an_autoscaler_has_its_bounds(api: ApiServer) -> None:
    ready = ["--for=condition=Ready", "scaledobject", "--all", f"--timeout={WITHIN_S:.0f}s"]
    waited = api.kubectl("wait", f"--namespace={NAMESPACE}", *ready)
    assert waited.returncode == 0, waited.stderr
    every = json.loads(api.kubectl("get", "scaledobjects", "-n", NAMESPACE, "-o", "json").stdout)
    assert {each["metadata"]["name"] for each in every["items"]} == set(SCALED)
    for each in every["items"]:
        name, spec = each["metadata"]["name"], each["spec"]
        autoscaler = found(api, "hpa", f"keda-hpa-{name}")["spec"]
        assert autoscaler["scaleTargetRef"]["kind"] == "Deployment"
        bounds = autoscaler["minReplicas"], autoscaler["maxReplicas"]
        assert bounds == (spec["minReplicaCount"], spec["maxReplicaCount"])
