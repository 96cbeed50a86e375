"""Manifests agree with the packages they deploy."""

import importlib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from fsspec.core import split_protocol
from rich.console import Console

from forgemq_agents.app import read_configuration
from forgemq_launcher.dispatch import run_tool
from forgemq_settings.environment import parse
from forgemq_sglang_cpu.options import EngineOptions, command_line, environment
from forgemq_shell.service import ServiceSettings
from tests.architecture.rendered import (
    BASE,
    OVERLAYS,
    ROOT,
    SERVICES,
    config_map,
    environ,
    manifests,
    pods,
)

KUBERNETES_VERSION = "1.34"


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_manifest_is_valid_against_the_api_schema(overlay: Path):
    own = custom_schemas()
    for manifest in manifests(overlay):
        kind = f"{manifest['apiVersion']}/{manifest['kind']}"
        if kind in own:
            jsonschema.validate(manifest, own[kind])
        else:
            kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def custom_schemas() -> dict[str, dict]:
    """Schema of every custom resource in use, in which a field that is not named is refused."""
    found = {}
    for each in yaml.safe_load_all((ROOT / "tests/cluster/crds.yaml").read_text()):
        for version in each["spec"]["versions"]:
            schema = closed(version["schema"]["openAPIV3Schema"])
            schema["properties"] |= {name: {} for name in ("apiVersion", "kind", "metadata")}
            spec = each["spec"]
            found[f"{spec['group']}/{version['name']}/{spec['names']['kind']}"] = schema
    return found


def closed(schema: dict) -> dict:
    made = dict(schema)
    if "properties" in made:
        made["properties"] = {name: closed(each) for name, each in made["properties"].items()}
        made["additionalProperties"] = False
    if "items" in made:
        made["items"] = closed(made["items"])
    return made


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_service_is_one_workload(overlay: Path):
    workloads = [
        manifest["metadata"]["name"]
        for manifest in manifests(overlay)
        if manifest["kind"] in {"Deployment", "StatefulSet"}
    ]
    services = {*SERVICES, "run"} - {"launcher"}
    assert sorted(set(workloads) - {"kafka"}) == sorted(services)
    assert len(workloads) == len(set(workloads))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_service_accepts_the_settings_of_its_manifest(overlay: Path):
    for service in sorted(set(SERVICES) - {"launcher"}):
        (container,) = (c for c in pods(overlay)[service]["containers"] if c["name"] == service)
        given = environ(overlay, container)
        module = importlib.import_module(f"forgemq_{service}.settings")
        settings = getattr(module, f"{service.title()}Settings")
        parse(settings, prefix=f"FORGEMQ_{service.upper()}_", environ=given)
        parse(ServiceSettings, prefix="FORGEMQ_SERVICE_", environ=given)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_what_creates_the_run_and_what_joins_it_mean_the_same_run(overlay: Path, tmp_path: Path):
    """Runs the command of each launcher container on the files that its pod would see."""
    (creating,) = (c for c in pods(overlay)["run"]["initContainers"] if c["name"] == "create")
    (resolving,) = pods(overlay)["agents"]["initContainers"]
    file = tmp_path / "run.toml"
    file.write_text(config_map(overlay, "forgemq-run-file")["run.toml"])
    made = []
    for number, container in enumerate((creating, resolving)):
        given = environ(overlay, container)
        _, path, run, *_ = container["args"]
        assert path == "/run/forgemq/run.toml"
        to = tmp_path / f"{number}.json"
        arguments = ["resolve", str(file), run.replace("$(FORGEMQ_RUN)", given["FORGEMQ_RUN"])]
        assert run_tool([*arguments, "--to", str(to)], environ={}, console=Console()) == 0
        made.append(read_configuration(str(to)))
    assert made[0] == made[1]
    assert made[0].run == config_map(overlay, "forgemq-run")["FORGEMQ_RUN"]
    (lanes,) = (
        manifest["spec"]["replicas"]
        for manifest in manifests(overlay)
        if manifest["kind"] == "StatefulSet" and manifest["metadata"]["name"] == "inference"
    )
    assert lanes == made[0].log.lanes
    mounts = {mount["mountPath"] for mount in creating["volumeMounts"]}
    seen = [Path(path) for path in (made[0].model.path, *made[0].code_paths)]
    assert all(any(Path(m).is_relative_to(path) for m in mounts) for path in seen), "for create"
    (ending,) = (c for c in pods(overlay)["run"]["containers"] if c["name"] == "end")
    assert made[0].model.path in {mount["mountPath"] for mount in ending["volumeMounts"]}, "inspect"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_the_model_is_on_its_claim_before_the_run_is_created_which_looks_at_it(overlay: Path):
    first = [container["name"] for container in pods(overlay)["run"]["initContainers"]]
    assert first == ["demo-model", "create"]


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_a_claim_that_a_pod_writes_to_can_be_written_to(overlay: Path):
    """A driver mounts a claim that is ReadOnlyMany alone without the right to write."""
    claims = {
        manifest["metadata"]["name"]: set(manifest["spec"]["accessModes"])
        for manifest in manifests(overlay)
        if manifest["kind"] == "PersistentVolumeClaim"
    }
    for name, pod in pods(overlay).items():
        used = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pod.get("volumes", ())
            if "persistentVolumeClaim" in volume
        }
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            for mount in container.get("volumeMounts", ()):
                if mount["name"] in used and not mount.get("readOnly", False):
                    modes = claims[used[mount["name"]]]
                    assert modes & {"ReadWriteOnce", "ReadWriteMany"}, (name, mount)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_a_pod_runs_as_nobody_special_and_its_volumes_are_writable(overlay: Path):
    for name, pod in pods(overlay).items():
        assert pod["securityContext"]["fsGroup"] > 0, name
        assert pod["automountServiceAccountToken"] is False, name
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            mounted = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
            if container["image"].partition(":")[0].removeprefix("forgemq-") in (
                *SERVICES,
                "engine",
            ):
                assert container["securityContext"]["readOnlyRootFilesystem"], name
                assert "/tmp" in mounted, f"{name}: nothing else is writable"
            used = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert used - {"checkpoints", "data"} <= volumes, name
            assert container["resources"]["requests"], name


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_who_reads_the_log_reaches_the_blobs_and_agents_reach_neither(overlay: Path):
    """A record's value may be in the blob store, so every reader and writer needs it."""
    protocol, path = split_protocol(config_map(overlay, "forgemq-run")["FORGEMQ_BLOBS"])
    for service in sorted(set(SERVICES) - {"launcher"}):
        (container,) = (c for c in pods(overlay)[service]["containers"] if c["name"] == service)
        writable = {
            mount["mountPath"]
            for mount in container["volumeMounts"]
            if not mount.get("readOnly", False)
        }
        given = environ(overlay, container)
        if service == "agents":
            assert not {path, "/blobs"} & writable
            assert not [name for name in given if name.startswith("FORGEMQ_KAFKA")]
        else:
            assert given["FORGEMQ_KAFKA"]
            sources = [each["secretRef"] for each in container["envFrom"] if "secretRef" in each]
            assert {"name": "forgemq-kafka", "optional": True} in sources, service
            if protocol == "file":
                assert path in writable, service
            else:
                assert {"name": "forgemq-blobs"} in sources, f"{service}: the store's credentials"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_what_listens_is_probed_and_every_selector_finds_pods(overlay: Path):
    for name, pod in pods(overlay).items():
        for container in pod["containers"]:
            # Metrics are shown by all, and are no service to others.
            if [port for port in container.get("ports", ()) if port["name"] != "metrics"]:
                assert {"readinessProbe", "livenessProbe"} <= container.keys(), name
    labels = [
        manifest["spec"]["template"]["metadata"]["labels"]
        for manifest in manifests(overlay)
        if manifest["kind"] in {"Deployment", "StatefulSet"}
    ]
    services = {m["metadata"]["name"]: m for m in manifests(overlay) if m["kind"] == "Service"}
    budgets = [m for m in manifests(overlay) if m["kind"] == "PodDisruptionBudget"]
    selectors = [service["spec"]["selector"] for service in services.values()]
    selectors += [budget["spec"]["selector"]["matchLabels"] for budget in budgets]
    assert budgets
    for selector in selectors:
        assert [each for each in labels if selector.items() <= each.items()], selector
    for manifest in manifests(overlay):
        if manifest["kind"] == "StatefulSet":
            governing = services[manifest["spec"]["serviceName"]]["spec"]
            assert governing["clusterIP"] == "None", "stable names need a headless service"


@pytest.mark.slow
@pytest.mark.parametrize("overlay", [BASE, *OVERLAYS], ids=lambda path: path.name)
def test_the_engine_is_started_as_the_launcher_would(overlay: Path):
    (engine,) = (c for c in pods(overlay)["inference"]["containers"] if c["name"] == "engine")
    has_gpu = "nvidia.com/gpu" in engine["resources"].get("limits", {})
    options = EngineOptions(has_gpu=has_gpu)
    given = set(engine["args"])
    _, _, _, *arguments = command_line(options, model_path="/model", host="0.0.0.0", port=30000)
    wanted, rest = set(), list(arguments)
    while rest:
        flag = rest.pop(0)
        has_value = rest and not rest[0].startswith("--")
        wanted.add(f"{flag}={rest.pop(0)}" if has_value else flag)
    # Not compared: only an engine that shares its cores needs to sleep while it is idle.
    assert given | {"--sleep-on-idle"} == wanted | {"--sleep-on-idle"}
    variables = {each["name"]: each["value"] for each in engine["env"]}
    assert variables.pop("HOME") == "/tmp", "its caches cannot lie on a read-only root"
    expected = environment(options, {}, pid=1, weight_bytes=0)
    ours = expected.keys() - {"FORGEMQ_ENGINE_PARENT", "CUDA_VISIBLE_DEVICES"}
    assert variables == {name: expected[name] for name in ours}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_published_weights_lie_where_trainer_inference_and_engine_mount_the_same_volume(
    overlay: Path,
):
    """Published paths are below FORGEMQ_BLOBS, so engines must mount it at the same path."""
    rendered = manifests(overlay)
    (blobs,) = {
        manifest["data"]["FORGEMQ_BLOBS"]
        for manifest in rendered
        if manifest["kind"] == "ConfigMap" and "FORGEMQ_BLOBS" in manifest.get("data", {})
    }
    protocol, path = split_protocol(blobs)
    if protocol not in (None, "file"):
        return  # With an object store weights are downloaded, so nothing has to be mounted.
    claims, mounts = {}, {}
    for manifest in rendered:
        if manifest["kind"] != "StatefulSet":
            continue
        pod = manifest["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            for mount in container.get("volumeMounts", ()):
                if path == mount["mountPath"] or path.startswith(mount["mountPath"] + "/"):
                    mounts[container["name"]] = not mount.get("readOnly", False)
                    source = volumes[mount["name"]]["persistentVolumeClaim"]
                    claims[container["name"]] = source["claimName"]
    expected = {"trainer", "inference", "engine"}
    assert expected <= mounts.keys()
    assert mounts["trainer"], "the trainer writes weights there"
    assert len({claims[name] for name in expected}) == 1
    (volume,) = (
        manifest
        for manifest in rendered
        if manifest["kind"] == "PersistentVolumeClaim"
        and manifest["metadata"]["name"] == claims["trainer"]
    )
    # A local cluster's storage gives a claim to one node, so all pods run on that node.
    mode = "ReadWriteMany" if overlay.name == "production" else "ReadWriteOnce"
    assert volume["spec"]["accessModes"] == [mode]
