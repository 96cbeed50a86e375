"""overlays/local with a shorter run, for a node without a registry and a provisioner of volumes.

Nothing of it is changed but the run file. Images are there under the names that the overlay says,
and each claim finds a volume that was made for it. The production overlay's network policies are
added.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from tests.architecture.rendered import ROOT, rendered
from tests.cluster.enclosure import ADDRESS
from tests.cluster.node import NAME

OVERLAY = ROOT / "deploy/kubernetes/overlays/local"
POLICIES = ROOT / "deploy/kubernetes/overlays/production/network.yaml"
NAMESPACE = "forgemq"
STEPS = 8
GROUPS_PER_STEP = 8
SHORTER = {"\nsteps = 40": f"\nsteps = {STEPS}", "\ntasks = 128": "\ntasks = 8"}
LONGER_LEASE = {"\nlease_s = 30.0": "\nlease_s = 40.0"}
NEXT_TAG = {
    f"{{name: forgemq-{name}, newTag: dev}}": f"{{name: forgemq-{name}, newTag: next}}"
    for name in ("merger", "console")
}
MODE = 0o777
"""Of a volume's folder, as the provisioner of k3s and kind makes it: everybody may write."""


def first_objects() -> list[dict]:
    """Every object of the overlay."""
    return rendered(OVERLAY, {"run.toml": replaced("run.toml", SHORTER)})


def changed_objects() -> list[dict]:
    """The same with another tag of two images and another run file."""
    return rendered(
        OVERLAY,
        {
            "run.toml": replaced("run.toml", SHORTER | LONGER_LEASE),
            "kustomization.yaml": replaced("kustomization.yaml", NEXT_TAG),
        },
    )


def policies() -> list[dict]:
    """Production's rules of who may open a connection to whom.

    The broker's rule is Strimzi's there. Names are answered by the node itself here, so agents may
    ask it in place of pods of kube-system.
    """
    named = {each["metadata"]["name"]: each for each in yaml.safe_load_all(POLICIES.read_text())}
    for rule in named["agents"]["spec"]["egress"]:
        if 53 in [each["port"] for each in rule["ports"]]:
            rule["to"] = [{"ipBlock": {"cidr": f"{ADDRESS}/32"}}]
    broker = {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kafka"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": 9092}]}],
    }
    named["kafka"] = named["gateway"] | {"metadata": {"name": "kafka"}, "spec": broker}
    return [
        each | {"metadata": {"name": name, "namespace": NAMESPACE}} for name, each in named.items()
    ]


def replaced(file: str, changes: dict[str, str]) -> str:
    """A file of the overlay with other texts."""
    text = (OVERLAY / file).read_text()
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def images(objects: Sequence[dict]) -> set[str]:
    """The name of every image."""
    pods = [each["spec"]["template"]["spec"] for each in objects if "template" in spec_of(each)]
    return {
        container["image"]
        for pod in pods
        for container in (*pod.get("initContainers", ()), *pod["containers"])
    }


def spec_of(item: dict) -> dict:
    """What an object wants; {} if it wants nothing."""
    return item.get("spec", {})


def volumes(objects: Sequence[dict], folder: Path) -> list[dict]:
    """A volume on the node for each claim, also for those that stateful sets will make."""
    made = []
    for name, claim in claims(objects):
        path = folder / name
        path.mkdir(parents=True)
        path.chmod(MODE)
        made.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": {
                    "accessModes": claim["accessModes"],
                    "capacity": claim["resources"]["requests"],
                    "hostPath": {"path": str(path), "type": "Directory"},
                    "claimRef": {"namespace": NAMESPACE, "name": name},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": [on_this_node()]}},
                },
            }
        )
    return made


def on_this_node() -> dict:
    """Selects the one node."""
    wanted = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NAME]}
    return {"matchExpressions": [wanted]}


def claims(objects: Sequence[dict]) -> Iterator[tuple[str, dict]]:
    """Name and specification of each claim."""
    for each in objects:
        name, spec = each["metadata"]["name"], spec_of(each)
        if each["kind"] == "PersistentVolumeClaim":
            yield name, spec
        for template in spec.get("volumeClaimTemplates", ()):
            for ordinal in range(spec["replicas"]):
                yield f"{template['metadata']['name']}-{name}-{ordinal}", template["spec"]
