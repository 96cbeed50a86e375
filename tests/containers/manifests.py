"""Pods of an overlay, as `kubectl kustomize` renders them: what a kubelet would start."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class Mount(Struct, frozen=True, kw_only=True):
    """A volume in a container."""

    volume: str
    path: str
    is_read_only: bool


class Container(Struct, frozen=True, kw_only=True):
    """One container of a pod; variables from fields of its pod are still references."""

    name: str
    image: str
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    variables: tuple[dict[str, Any], ...]
    mounts: tuple[Mount, ...]
    security: dict[str, Any]
    memory_bytes_max: int | None


class Workload(Struct, frozen=True, kw_only=True):
    """A deployment, stateful set or job.

    Attributes:
        services: Names under which others reach its pods.
        governing: The headless service of a stateful set, "" of others.
    """

    kind: str
    name: str
    replicas: int
    services: tuple[str, ...]
    governing: str
    security: dict[str, Any]
    grace_s: int
    first: tuple[Container, ...]
    containers: tuple[Container, ...]
    volumes: dict[str, dict[str, Any]]


class Overlay:
    """The rendered manifests of an overlay."""

    def __init__(self, manifests: Sequence[dict[str, Any]]) -> None:
        """Index what pods refer to."""
        self.manifests = manifests
        self._data = {
            (each["kind"], each["metadata"]["name"]): _data_of(each)
            for each in manifests
            if each["kind"] in {"ConfigMap", "Secret"}
        }

    def data(self, kind: str, name: str) -> dict[str, str] | None:
        """What a config map or secret holds; None if there is none of this name."""
        return self._data.get((kind, name))

    def workloads(self) -> dict[str, Workload]:
        """Every workload by name."""
        return {
            each["metadata"]["name"]: self._workload(each)
            for each in self.manifests
            if each["kind"] in {"Deployment", "StatefulSet", "Job"}
        }

    def variables(self, container: Container, *, fields: Mapping[str, str]) -> dict[str, str]:
        """The environment of a container in a pod with these fields."""
        found: dict[str, str] = {}
        for each in container.variables:
            if "configMapRef" in each or "secretRef" in each:
                kind = "ConfigMap" if "configMapRef" in each else "Secret"
                source = each.get("configMapRef") or each["secretRef"]
                data = self.data(kind, source["name"])
                assert data is not None or source.get("optional"), source
                found |= data or {}
            else:
                found[each["name"]] = expanded(self._value(each, fields), found)
        return found

    def _value(self, variable: dict[str, Any], fields: Mapping[str, str]) -> str:
        source = variable.get("valueFrom", {})
        for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
            if key in source:
                data = self.data(kind, source[key]["name"])
                assert data is not None, source
                return data[source[key]["key"]]
        if "fieldRef" in source:
            return fields[source["fieldRef"]["fieldPath"]]
        return str(variable.get("value", ""))

    def _workload(self, manifest: dict[str, Any]) -> Workload:
        spec = manifest["spec"]
        pod = spec["template"]["spec"]
        labels = spec["template"].get("metadata", {}).get("labels", {})
        claims = {
            each["metadata"]["name"]: {"ownClaim": {}}
            for each in spec.get("volumeClaimTemplates", ())
        }
        return Workload(
            kind=manifest["kind"],
            name=manifest["metadata"]["name"],
            replicas=spec.get("replicas", 1),
            services=tuple(
                each["metadata"]["name"]
                for each in self.manifests
                if each["kind"] == "Service" and each["spec"]["selector"].items() <= labels.items()
            ),
            governing=spec.get("serviceName", ""),
            security=pod.get("securityContext", {}),
            grace_s=pod.get("terminationGracePeriodSeconds", 30),
            first=tuple(map(_container, pod.get("initContainers", ()))),
            containers=tuple(map(_container, pod["containers"])),
            volumes=claims | {each["name"]: each for each in pod.get("volumes", ())},
        )


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """A text with each `$(NAME)` of a known variable replaced."""
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text


def _data_of(manifest: dict[str, Any]) -> dict[str, str]:
    data = manifest.get("data", {})
    if manifest["kind"] == "ConfigMap":
        return data
    decoded = {name: base64.b64decode(value).decode() for name, value in data.items()}
    return decoded | manifest.get("stringData", {})


def _container(spec: dict[str, Any]) -> Container:
    limit = spec.get("resources", {}).get("limits", {}).get("memory")
    return Container(
        name=spec["name"],
        image=spec["image"],
        command=tuple(spec.get("command", ())),
        arguments=tuple(spec.get("args", ())),
        variables=(*spec.get("envFrom", ()), *spec.get("env", ())),
        mounts=tuple(
            Mount(volume=m["name"], path=m["mountPath"], is_read_only=m.get("readOnly", False))
            for m in spec.get("volumeMounts", ())
        ),
        security=spec.get("securityContext", {}),
        memory_bytes_max=bytes_of(limit) if limit else None,
    )


def bytes_of(quantity: str) -> int:
    """Bytes of a quantity such as 512Mi."""
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]
