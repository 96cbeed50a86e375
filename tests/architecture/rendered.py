"""What `kubectl kustomize` makes of deploy/kubernetes, for the tests about it."""

import base64
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir())
BASE = ROOT / "deploy/kubernetes/base"
OVERLAYS = sorted((ROOT / "deploy/kubernetes/overlays").iterdir())
FIELDS = {
    "metadata.labels['apps.kubernetes.io/pod-index']": "0",
    "metadata.labels['controller-revision-hash']": "trainer-5f7d9c",
    "metadata.name": "trainer-0",
    "metadata.namespace": "forgemq",
    "status.podIP": "10.0.0.7",
}
KEY = "0123456789abcdef0123456789abcdef"
"""Put where git ignores the one that somebody makes by hand."""


@functools.cache
def manifests(overlay: Path) -> list[dict]:
    """Every object of the overlay."""
    return rendered(overlay)


def rendered(
    overlay: Path, changes: Mapping[str, str] | None = None, *, namespace: str = ""
) -> list[dict]:
    """Every object of the overlay.

    Args:
        overlay: Folder of a kustomization.
        changes: Other texts for some of its files, by their names.
        namespace: Another one than the overlay's, as for a run beside it.
    """
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "deploy"
        for part in ("kubernetes", "demo", "observability"):
            shutil.copytree(ROOT / "deploy" / part, copy / part)
        for each in (copy / "kubernetes/overlays").iterdir():
            for name in ("admin-key", "console-key"):
                (each / name).write_text(KEY)
        place = copy / overlay.relative_to(ROOT / "deploy")
        for name, text in (changes or {}).items():
            (place / name).write_text(text)
        if namespace:
            beside = copy / "beside"
            beside.mkdir()
            above = {"resources": [f"../{place.relative_to(copy)}"], "namespace": namespace}
            (beside / "kustomization.yaml").write_text(yaml.safe_dump(above))
            place = beside
        made = subprocess.run(
            ["kubectl", "kustomize", str(place)], capture_output=True, text=True, check=False
        )
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def pods(overlay: Path) -> dict[str, dict]:
    """Pod specification of every workload and job, by name."""
    return {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["spec"]
        for manifest in manifests(overlay)
        if manifest["kind"] in {"Deployment", "StatefulSet", "Job"}
    }


def config_map(overlay: Path, name: str) -> dict[str, str]:
    """The config map of this name, with the hash at its end or without."""
    (found,) = (
        manifest["data"]
        for manifest in manifests(overlay)
        if manifest["kind"] == "ConfigMap" and name in names_of(manifest)
    )
    return found


def names_of(manifest: dict) -> tuple[str, str]:
    """The object's name, and the name without the hash that a generator puts at its end."""
    name = manifest["metadata"]["name"]
    return name, name.rpartition("-")[0]


def secret(overlay: Path, name: str) -> dict[str, str]:
    """The secret of this name, if the overlay makes it, else an unknown value for each key."""
    for manifest in manifests(overlay):
        if manifest["kind"] == "Secret" and name in names_of(manifest):
            return {key: base64.b64decode(v).decode() for key, v in manifest["data"].items()}
    return UnknownValues()


class UnknownValues(dict[str, str]):
    """A secret that somebody else makes; every key is there."""

    def __missing__(self, key: str) -> str:
        return f"{key}-of-16-or-more-characters"


def environ(overlay: Path, container: dict) -> dict[str, str]:
    """All variables of the container, including those from config maps and secrets."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            found |= config_map(overlay, source["configMapRef"]["name"])
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            value = secret(overlay, reference["name"])[reference["key"]]
        elif "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            value = config_map(overlay, reference["name"])[reference["key"]]
        elif "fieldRef" in source:
            value = FIELDS[source["fieldRef"]["fieldPath"]]
        else:
            value = variable["value"]
        # Kubernetes expands only variables that are defined before this one.
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[variable["name"]] = value
    return found
