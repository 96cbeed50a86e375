"""What keeps pods of a run alive in a Kubernetes cluster, as a person names it."""

from typing import NamedTuple

SCALED_OBJECTS = "scaledobjects"
GROUP_VERSIONS = {
    "deployments": "apps/v1",
    "statefulsets": "apps/v1",
    SCALED_OBJECTS: "keda.sh/v1alpha1",
}
"""Of the API, by the kinds whose pods can be given back."""


class Workload(NamedTuple):
    """What keeps a number of pods alive, as `deployments/agents`."""

    kind: str
    name: str


def workload_of(text: str) -> Workload:
    """Parse `kind/name`; ValueError if pods of this kind cannot be given back."""
    kind, _, name = text.partition("/")
    if kind not in GROUP_VERSIONS or not name:
        raise ValueError(f"must be KIND/NAME with {', '.join(GROUP_VERSIONS)}, got {text!r}")
    return Workload(kind, name)
