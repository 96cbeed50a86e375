"""Overlays are applied again and again, fit their node and satisfy its admission."""

import copy
import re
from pathlib import Path

import pytest

from forgemq_inference.settings import InferenceSettings
from forgemq_settings.environment import parse
from forgemq_shell.loop_watch import TOUCH_EVERY_S
from forgemq_shell.service import ServiceSettings
from tests.architecture.rendered import (
    KEY,
    OVERLAYS,
    ROOT,
    SERVICES,
    environ,
    manifests,
    names_of,
    pods,
    rendered,
    secret,
)

LOCAL = ROOT / "deploy/kubernetes/overlays/local"
TEMPLATES_CHANGE = ("Deployment", "StatefulSet")
NODE_CORES, NODE_BYTES = 2.0, 8 << 30
SYSTEM_CORES, SYSTEM_BYTES = 0.5, 1 << 30
"""What Kubernetes' own pods and the node's system ask for, as a small local cluster has it."""
UNITS = {"": 1, "Mi": 1 << 20, "Gi": 1 << 30}


def workloads(objects: list[dict]) -> dict[str, dict]:
    return {m["metadata"]["name"]: m for m in objects if m["kind"] in TEMPLATES_CHANGE}


def rolled(changes: dict[str, str]) -> set[str]:
    """Workloads of the local overlay whose pods are made again after these changes of its files."""
    before, after = workloads(manifests(LOCAL)), workloads(rendered(LOCAL, changes))
    assert before.keys() == after.keys()
    return {
        name
        for name, each in after.items()
        if each["spec"]["template"] != before[name]["spec"]["template"]
    }


def kustomization(old: str, new: str) -> dict[str, str]:
    text = (LOCAL / "kustomization.yaml").read_text()
    assert old in text
    return {"kustomization.yaml": text.replace(old, new)}


@pytest.mark.slow
def test_a_change_rolls_exactly_what_reads_it():
    own = set(pods(LOCAL)) - {"kafka"}
    run_file = (LOCAL / "run.toml").read_text().replace("steps = 40", "steps = 41")
    assert rolled({}) == set()
    assert rolled({"run.toml": run_file}) == {"run", "agents"}
    assert rolled({"admin-key": KEY[::-1]}) == {"gateway", "agents"}
    assert rolled({"console-key": KEY[::-1]}) == {"console"}
    assert rolled(kustomization("FORGEMQ_RUN=demo", "FORGEMQ_RUN=second")) == own
    assert rolled(kustomization("newTag: dev", "newTag: next")) == own
    assert rolled(kustomization("reward, newTag: dev", "reward, newTag: next")) == {"reward"}


def test_code_of_the_run_rolls_what_imports_it():
    found = {
        name
        for name, pod in pods(LOCAL).items()
        for volume in pod.get("volumes", ())
        if volume.get("configMap", {}).get("name", "").startswith("forgemq-code-")
    }
    assert found == {"run", "agents", "reward", "trainer"}


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_a_second_apply_changes_nothing_that_the_api_keeps_as_it_was(overlay: Path):
    """Jobs have immutable templates; so have these parts of other kinds."""
    text = (overlay / "kustomization.yaml").read_text()
    changed = re.sub(r"newTag: \S+?(?=[,}\s])", "newTag: next", text)
    changed = re.sub(r"FORGEMQ_RUN=\S+", "FORGEMQ_RUN=second", changed)
    run_file = (overlay / "run.toml").read_text().replace("seed = 0", "seed = 1")
    after = rendered(overlay, {"kustomization.yaml": changed, "run.toml": run_file})
    assert workloads(after) != workloads(manifests(overlay))
    assert not [m for m in after if m["kind"] == "Job"]
    assert frozen(after) == frozen(manifests(overlay))


def frozen(objects: list[dict]) -> list[object]:
    """What the API refuses to change in a living object."""
    found: list[object] = []
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] in TEMPLATES_CHANGE:
            parts = ("selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy")
            found.append((each["metadata"]["name"], [spec.get(part) for part in parts]))
        if each["kind"] == "PersistentVolumeClaim":
            found.append((each["metadata"]["name"], spec))
        if each["kind"] == "RoleBinding":
            found.append(each["roleRef"])
    return copy.deepcopy(found)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_pod_satisfies_the_restricted_standard_that_its_namespace_enforces(overlay: Path):
    """The checks of Kubernetes' Pod Security Standards, level restricted, for Linux pods."""
    (namespace,) = (m for m in manifests(overlay) if m["kind"] == "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    allowed = {
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
        *("persistentVolumeClaim", "projected", "secret"),
    }
    for name, pod in pods(overlay).items():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        whole = pod["securityContext"]
        for volume in pod.get("volumes", ()):
            assert len(volume.keys() & allowed) == 1, (name, volume)
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, (name, container["name"])
            assert own["capabilities"] == {"drop": ["ALL"]}, (name, container["name"])
            assert own.get("runAsNonRoot", whole.get("runAsNonRoot")), (name, container["name"])
            assert own.get("runAsUser", whole.get("runAsUser", 65532)) > 0
            assert not own.get("privileged", False)
            profile = own.get("seccompProfile", whole["seccompProfile"])
            assert profile["type"] in {"RuntimeDefault", "Localhost"}, name
            assert not [p for p in container.get("ports", ()) if "hostPort" in p]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("service", "variable"),
    [
        ("gateway", "FORGEMQ_GATEWAY_ADMIN_KEY_FILE"),
        ("console", "FORGEMQ_CONSOLE_KEY_FILE"),
    ],
)
def test_a_server_takes_its_keys_from_a_file_that_changes_with_the_secret(
    overlay: Path, service: str, variable: str
):
    """A variable stays as it was at the start, and so does a mount of a single file (subPath)."""
    pod = pods(overlay)[service]
    (container,) = pod["containers"]
    given = environ(overlay, container)
    path = Path(given[variable])
    (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == str(path.parent))
    assert (mount["readOnly"], "subPath" in mount) == (True, False)
    (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
    assert len(secret(overlay, volume["secret"]["secretName"])[path.name]) >= 16
    assert not [each for each in container["env"] if "admin-key" in str(each.get("valueFrom"))]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_no_file_in_a_pod_that_runs_code_of_users_has_a_key(overlay: Path):
    """Their processes hide the environment, and a program may read every file of its user."""
    for name in ("agents", "reward"):
        secrets = {
            v["secret"]["secretName"] for v in pods(overlay)[name]["volumes"] if "secret" in v
        }
        assert secrets <= {"forgemq-kafka-ca", "forgemq-cluster-ca-cert"}, name


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_image_has_a_tag_so_one_that_a_node_holds_is_not_pulled(overlay: Path):
    """Without a policy Kubernetes pulls always if the tag is absent or `latest`, else if needed."""
    for name, pod in pods(overlay).items():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            _, _, tag = container["image"].rpartition("/")[2].partition(":")
            assert tag not in {"", "latest"}, (name, container["image"])
            assert container.get("imagePullPolicy", "IfNotPresent") == "IfNotPresent"


def test_the_local_overlay_fits_a_node_of_two_cores_and_eight_gibibytes():
    cores = memory_bytes = 0.0
    for each in workloads(manifests(LOCAL)).values():
        pod = each["spec"]["template"]["spec"]
        for name, total in (("cpu", 0.0), ("memory", 0.0)):
            running = sum(asked(c, name) for c in pod["containers"])
            starting = max((asked(c, name) for c in pod.get("initContainers", ())), default=0.0)
            total = max(running, starting) * each["spec"]["replicas"]
            cores, memory_bytes = (
                (cores + total, memory_bytes) if name == "cpu" else (cores, memory_bytes + total)
            )
    assert cores <= NODE_CORES - SYSTEM_CORES
    assert memory_bytes <= NODE_BYTES - SYSTEM_BYTES


def asked(container: dict, resource: str) -> float:
    """What the container requests, in cores or bytes."""
    number, unit = re.fullmatch(
        r"([0-9.]+)([A-Za-z]*)", str(container["resources"]["requests"][resource])
    ).groups()
    return float(number) / 1000 if unit == "m" else float(number) * UNITS[unit]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_metrics_are_shown_on_the_port_of_that_name_by_every_service_or_none(overlay: Path):
    for name, pod in pods(overlay).items():
        if name in SERVICES:
            container = pod["containers"][0]
            ports = {each["name"]: each["containerPort"] for each in container.get("ports", ())}
            settings = environ(overlay, container)
            is_shown = settings.get("FORGEMQ_TELEMETRY_EXPORTER") == "prometheus"
            assert is_shown == (overlay != LOCAL), name
            shown = ports.get("metrics")
            assert str(shown) == settings.get("FORGEMQ_TELEMETRY_PORT", "None"), name
            assert not is_shown or settings["FORGEMQ_TELEMETRY_HOST"] == "0.0.0.0", name


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_a_startup_probe_outlasts_the_wait_for_the_runs_record(overlay: Path):
    """A pod that is killed while it waits would never see the record of a run that is late."""
    for name in ("gateway", "console"):
        (container,) = (c for c in pods(overlay)[name]["containers"] if c["name"] == name)
        given = environ(overlay, container)
        waits_s = parse(ServiceSettings, prefix="FORGEMQ_SERVICE_", environ=given).start_timeout_s
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= waits_s + 60, name


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_service_that_reads_the_log_is_restarted_if_it_hangs(overlay: Path):
    """By HTTP or by the age of the file that it touches; agents retry and give up by themselves."""
    for name in sorted(set(SERVICES) - {"launcher", "agents"}):
        (container,) = (c for c in pods(overlay)[name]["containers"] if c["name"] == name)
        probe = container["livenessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 60, name
        if "httpGet" in probe:
            continue
        file = environ(overlay, container)["FORGEMQ_SERVICE_ALIVE_FILE"]
        assert f"find {file} -newermt '60 seconds ago'" in probe["exec"]["command"][-1]
        assert container["startupProbe"]["exec"] == probe["exec"]
        assert TOUCH_EVERY_S * 6 <= 60


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_a_pod_gets_the_time_in_which_its_service_stops_by_itself(overlay: Path):
    for name, pod in pods(overlay).items():
        if name not in SERVICES:
            continue
        (container,) = (c for c in pod["containers"] if c["name"] == name)
        given = environ(overlay, container)
        grace_s = parse(ServiceSettings, prefix="FORGEMQ_SERVICE_", environ=given).stop_grace_s
        assert pod["terminationGracePeriodSeconds"] >= grace_s + 10, name
        if name == "inference":
            own = parse(InferenceSettings, prefix="FORGEMQ_INFERENCE_", environ=given)
            assert own.drain_s < grace_s, "else requests in work are cancelled with the service"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_the_end_of_a_run_releases_every_workload_but_the_page_and_may_change_no_other(
    overlay: Path,
):
    (end,) = pods(overlay)["run"]["containers"]
    named = {each["name"]: each.get("value", "") for each in end["env"]}["RELEASED"]
    released = {tuple(each.split("/")) for each in named.split(",")}
    kinds = {"Deployment": "deployments", "StatefulSet": "statefulsets"}
    scaled = {
        m["spec"]["scaleTargetRef"]["name"]
        for m in manifests(overlay)
        if m["kind"] == "ScaledObject"
    }
    wanted = {
        (kinds[m["kind"]], name) if name not in scaled else ("scaledobjects", name)
        for name, m in workloads(manifests(overlay)).items()
        if name not in {"run", "console", "kafka"}
    }
    assert released == wanted
    (role,) = (m for m in manifests(overlay) if m["kind"] == "Role")
    allowed = {
        (resource.removesuffix("/scale"), name)
        for rule in role["rules"]
        for resource in rule["resources"]
        for name in rule["resourceNames"]
    }
    assert released <= allowed
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"patch"}
    assert names_of(role)[0] == "run"


def test_the_local_brokers_own_topics_have_few_partitions():
    (kafka,) = pods(LOCAL)["kafka"]["containers"]
    given = {each["name"]: each["value"] for each in kafka["env"]}
    for topic in ("OFFSETS_TOPIC", "TRANSACTION_STATE_LOG", "SHARE_COORDINATOR_STATE_TOPIC"):
        assert given[f"KAFKA_{topic}_NUM_PARTITIONS"] == "4"
