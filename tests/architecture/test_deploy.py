"""Images, manifests and the Tiltfile agree with the packages they deploy."""

import importlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import kubernetes_validate
import msgspec
import pytest
import starlark
import yaml
from fsspec.core import split_protocol

ROOT = Path(__file__).parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir())
OVERLAYS = sorted((ROOT / "deploy/kubernetes/overlays").iterdir())
KUBERNETES_VERSION = "1.34"


def own_dependencies(folder: Path) -> set[str]:
    """Folders of the workspace that this package needs, its dependencies' included."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    names = {
        re.split(r"[\[<>= ]", dependency)[0].removeprefix("forgemq-").replace("-", "_")
        for dependency in project["dependencies"]
        if dependency.startswith("forgemq")
    }
    folders = {
        "contracts" if name == "contracts" else f"libs/{name.replace('-', '_')}" for name in names
    }
    return folders | {deep for name in folders for deep in own_dependencies(ROOT / name)}


@pytest.mark.parametrize("service", SERVICES)
def test_the_image_copies_exactly_what_the_service_needs(service: str):
    lines = (ROOT / f"services/{service}/Dockerfile").read_text().splitlines()
    copies = {line.split()[1] for line in lines if line.startswith("COPY") and "--from" not in line}
    expected = own_dependencies(ROOT / f"services/{service}") | {f"services/{service}"}
    assert copies - {"requirements.lock"} == expected
    assert any(line.startswith("USER 65532") for line in lines), "an image must not run as root"


@pytest.mark.parametrize("service", SERVICES)
def test_the_image_starts_the_service(service: str):
    text = (ROOT / f"services/{service}/Dockerfile").read_text()
    if service == "launcher":
        scripts = tomllib.loads((ROOT / "services/launcher/pyproject.toml").read_text())
        assert 'ENTRYPOINT ["forgemq"]' in text
        assert "forgemq" in scripts["project"]["scripts"]
    else:
        assert f'"forgemq.{service}"]' in text
        assert (ROOT / f"services/{service}/src/forgemq/{service}/__main__.py").exists()


def manifests(overlay: Path) -> list[dict]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=True
    )
    return list(yaml.safe_load_all(rendered.stdout))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_manifest_is_valid_against_the_api_schema(overlay: Path):
    for manifest in manifests(overlay):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_service_is_one_workload(overlay: Path):
    workloads = [
        manifest["metadata"]["name"]
        for manifest in manifests(overlay)
        if manifest["kind"] in {"Deployment", "StatefulSet"}
    ]
    assert sorted(set(workloads) - {"kafka"}) == sorted(set(SERVICES) - {"launcher"})
    assert len(workloads) == len(set(workloads))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_setting_in_a_manifest_is_a_field_of_the_service(overlay: Path):
    for manifest in manifests(overlay):
        if manifest["kind"] not in {"Deployment", "StatefulSet"}:
            continue
        service = manifest["metadata"]["name"]
        containers = manifest["spec"]["template"]["spec"]["containers"]
        prefix = f"FORGEMQ_{service.upper()}_"
        names = {
            variable["name"].removeprefix(prefix).lower()
            for container in containers
            for variable in container.get("env", ())
            if variable["name"].startswith(prefix)
        }
        if names:
            module = importlib.import_module(f"forgemq.{service}.settings")
            settings = getattr(module, f"{service.title()}Settings")
            assert names <= {field.name for field in msgspec.structs.fields(settings)}, service


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_published_weights_lie_where_trainer_inference_and_engine_mount_the_same_volume(
    overlay: Path,
):
    """The trainer publishes paths below FORGEMQ_BLOBS; who loads them must see them there."""
    rendered = manifests(overlay)
    (blobs,) = {
        manifest["data"]["FORGEMQ_BLOBS"]
        for manifest in rendered
        if manifest["kind"] == "ConfigMap" and "FORGEMQ_BLOBS" in manifest.get("data", {})
    }
    protocol, path = split_protocol(blobs)
    if protocol not in (None, "file"):
        return  # An object store: weights are downloaded, nothing has to be mounted.
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
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_tiltfile_builds_every_service_and_applies_the_local_overlay():
    calls: list[tuple[str, tuple, dict]] = []
    module = starlark.Module()
    for name in ("docker_build", "k8s_yaml", "k8s_resource", "local_resource", "kustomize"):

        def record(*args, _name=name, **kwargs):
            calls.append((_name, args, kwargs))
            return args[0] if args else None

        module.add_callable(name, record)
    module["TRIGGER_MODE_MANUAL"] = 1
    dialect = starlark.Dialect.extended()
    dialect.enable_top_level_stmt = True
    syntax = starlark.parse("Tiltfile", (ROOT / "Tiltfile").read_text(), dialect=dialect)
    starlark.eval(module, syntax, starlark.Globals.standard())
    images = {args[0] for name, args, _ in calls if name == "docker_build"}
    assert images == {f"forgemq-{service}" for service in SERVICES}
    for _, _, options in (call for call in calls if call[0] == "docker_build"):
        assert (ROOT / options["dockerfile"]).exists()
    overlay = next(args[0] for name, args, _ in calls if name == "kustomize")
    assert (ROOT / overlay / "kustomization.yaml").exists()
