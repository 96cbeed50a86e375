"""A real API server admits every overlay, also after a change, and enforces who may do what."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from forgemq_launcher.core.workloads import workload_of
from forgemq_launcher.upkeep.cluster import Cluster, ClusterError
from tests.architecture.rendered import OVERLAYS, rendered
from tests.cluster.api_server import ApiServer, api_server
from tests.cluster.programs import missing_for_server, server_command

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CRDS = Path(__file__).parent / "crds.yaml"
WORKLOADS = ("Deployment", "StatefulSet")


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if missing_for_server() or not Path(server_command()[0]).is_file():
        pytest.skip(missing_for_server() or "make test-cluster-admission compiles the server first")
    with api_server(tmp_path_factory.mktemp("api")) as server:
        made = server.kubectl("apply", "--server-side", "-f", str(CRDS))
        assert made.returncode == 0, made.stderr
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        yield server


def namespace_of(overlay: Path) -> str:
    """A namespace of its own, so that all overlays are in one cluster beside each other."""
    return f"forgemq-{overlay.name}"


def changed(overlay: Path) -> list[dict]:
    """The overlay with another tag and another run file."""
    text = (overlay / "kustomization.yaml").read_text()
    for tag in ("newTag: dev", "newTag: 0.1.0"):
        text = text.replace(tag, "newTag: next")
    run_file = (overlay / "run.toml").read_text().replace("seed = 0", "seed = 7")
    files = {"kustomization.yaml": text, "run.toml": run_file}
    return rendered(overlay, files, namespace=namespace_of(overlay))


def generations(api: ApiServer, overlay: Path) -> dict[str, int]:
    """How often the wanted state of each workload changed."""
    kinds = "deployments,statefulsets"
    found = api.kubectl("get", kinds, "-n", namespace_of(overlay), "-o", "json")
    items = json.loads(found.stdout)["items"]
    return {each["metadata"]["name"]: each["metadata"]["generation"] for each in items}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_an_overlay_is_admitted_and_again_after_a_change_which_rolls_its_pods(
    api: ApiServer, overlay: Path
):
    objects = rendered(overlay, namespace=namespace_of(overlay))
    first = api.apply(objects)
    assert first.returncode == 0, first.stderr
    assert first.stderr == "", "no warning, also none of Pod Security"
    assert len(first.stdout.splitlines()) == len(objects)
    before = generations(api, overlay)
    again = api.apply(objects)
    assert (again.returncode, again.stderr) == (0, "")
    assert generations(api, overlay) == before, "nothing rolls if nothing changed"
    second = api.apply(changed(overlay))
    assert (second.returncode, second.stderr) == (0, "")
    own = {name for name in before if name != "kafka"}
    assert {n for n, g in generations(api, overlay).items() if g > before[n]} == own


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_pod_of_an_overlay_is_admitted_by_its_namespace_and_a_privileged_one_is_not(
    api: ApiServer, overlay: Path
):
    namespace, objects = namespace_of(overlay), rendered(overlay, namespace=namespace_of(overlay))
    assert api.apply(objects).returncode == 0
    account = {"apiVersion": "v1", "kind": "ServiceAccount"}
    api.apply([{**account, "metadata": {"name": "default", "namespace": namespace}}])
    pods = [pod_of(each, namespace) for each in objects if each["kind"] in WORKLOADS]
    for pod in pods:
        made = try_pod(api, pod)
        assert made.returncode == 0, (pod["metadata"]["name"], made.stderr)
    worse = copy.deepcopy(pods[0])
    worse["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    refused = try_pod(api, worse)
    assert refused.returncode != 0
    assert 'violates PodSecurity "restricted' in refused.stderr


def pod_of(workload: dict, namespace: str) -> dict:
    """The pod that the workload's controller would create."""
    template, name = workload["spec"]["template"], workload["metadata"]["name"]
    spec = copy.deepcopy(template["spec"])
    for claim in workload["spec"].get("volumeClaimTemplates", ()):
        named = claim["metadata"]["name"]
        volume = {"name": named, "persistentVolumeClaim": {"claimName": f"{named}-{name}-0"}}
        spec.setdefault("volumes", []).append(volume)
    labels = template["metadata"]["labels"]
    metadata = {"name": f"{name}-0", "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def try_pod(api: ApiServer, pod: dict):
    return api.kubectl("create", "--dry-run=server", "-f", "-", given=yaml.safe_dump(pod))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_the_pod_that_ends_a_run_may_release_what_it_names_and_nothing_else(
    api: ApiServer, overlay: Path, tmp_path: Path
):
    namespace, objects = namespace_of(overlay), rendered(overlay, namespace=namespace_of(overlay))
    assert api.apply(objects).returncode == 0
    cluster = cluster_of_run(api, namespace, tmp_path / "token")
    (run,) = (m for m in objects if m["kind"] == "Deployment" and m["metadata"]["name"] == "run")
    env = run["spec"]["template"]["spec"]["containers"][0]["env"]
    (named,) = (each["value"] for each in env if each["name"] == "RELEASED")
    released = [workload_of(each) for each in named.split(",")]
    for workload in released:
        cluster.release(workload)
    for other in ("deployments/console", "deployments/run"):
        with pytest.raises(ClusterError, match="403"):
            cluster.release(workload_of(other))
    wanted = {f"{each.kind}/{each.name}" for each in released if each.kind != "scaledobjects"}
    assert {name for name in wanted if replicas(api, namespace, name) != 0} == set()
    assert replicas(api, namespace, "deployments/console") == 1
    paused = [each for each in released if each.kind == "scaledobjects"]
    assert [annotations(api, namespace, each.name) for each in paused] == [{"0"}] * len(paused)
    for workload in paused:
        cluster.resume(workload)
    assert [annotations(api, namespace, each.name) for each in paused] == [set()] * len(paused)


def test_the_next_run_takes_back_what_an_ended_one_released(api: ApiServer, tmp_path: Path):
    """Its replicas are another manager's since then, so the apply says that it takes them."""
    overlay = next(each for each in OVERLAYS if each.name == "local")
    namespace, objects = namespace_of(overlay), rendered(overlay, namespace=namespace_of(overlay))
    assert api.apply(objects).returncode == 0
    cluster = cluster_of_run(api, namespace, tmp_path / "token")
    cluster.release(workload_of("statefulsets/trainer"))
    assert replicas(api, namespace, "statefulsets/trainer") == 0
    text = (overlay / "kustomization.yaml").read_text().replace("RUN=demo", "RUN=second")
    following = rendered(overlay, {"kustomization.yaml": text}, namespace=namespace)
    taken = api.kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        "-f",
        "-",
        given=yaml.safe_dump_all(following),
    )
    assert taken.returncode == 0, taken.stderr
    assert replicas(api, namespace, "statefulsets/trainer") == 1


def cluster_of_run(api: ApiServer, namespace: str, token_file: Path) -> Cluster:
    """What the pod `run` has; makes it a token in this file."""
    token = api.kubectl("create", "token", "run", "-n", namespace)
    assert token.returncode == 0, token.stderr
    token_file.write_text(token.stdout)
    return Cluster(
        url=api.url, namespace=namespace, token_file=str(token_file), ca_file=str(api.ca_file)
    )


def replicas(api: ApiServer, namespace: str, name: str) -> int:
    found = api.kubectl("get", name, "-n", namespace, "-o", "jsonpath={.spec.replicas}")
    return int(found.stdout)


def annotations(api: ApiServer, namespace: str, name: str) -> set[str]:
    """To how many pods KEDA holds it; empty if it scales it."""
    found = api.kubectl("get", f"scaledobjects/{name}", "-n", namespace, "-o", "json")
    all_of_it = json.loads(found.stdout)["metadata"].get("annotations", {})
    return {v for k, v in all_of_it.items() if k == "autoscaling.keda.sh/paused-replicas"}
