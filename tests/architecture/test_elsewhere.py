"""With the component `agents-elsewhere`, agents of other namespaces play the run of an overlay."""

from functools import cache
from urllib.parse import urlsplit

import pytest

from tests.architecture.rendered import ROOT, environ, rendered

pytestmark = pytest.mark.slow

OVERLAY = ROOT / "deploy/kubernetes/overlays/production"
COMPONENT = "../../components/agents-elsewhere"
README = ROOT / "deploy/kubernetes/README.md"


@cache
def objects() -> dict[tuple[str, str], dict]:
    """Every object of the production overlay with the component, by kind and name."""
    name = "kustomization.yaml"
    text = (OVERLAY / name).read_text()
    first = "components:\n"
    assert text.count(first) == 1
    with_component = text.replace(first, f"{first}  - {COMPONENT}\n")
    made = rendered(OVERLAY, {name: with_component})
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def test_episodes_give_out_a_url_of_the_gateways_service_that_every_namespace_resolves() -> None:
    (container,) = objects()["StatefulSet", "gateway"]["spec"]["template"]["spec"]["containers"]
    given = urlsplit(environ(OVERLAY, container)["FORGEMQ_GATEWAY_PUBLIC_URL"])
    service, namespace, kind = given.hostname.split(".")
    found = objects()["Service", service]
    assert (found["metadata"]["namespace"], kind) == (namespace, "svc")
    assert given.port in [each["port"] for each in found["spec"]["ports"]]
    assert f"http://{given.netloc}" in README.read_text()


def test_only_namespaces_with_the_label_of_the_readme_reach_the_gateway_beside_its_own_users() -> (
    None
):
    policy = objects()["NetworkPolicy", "gateway-from-elsewhere"]["spec"]
    workload = objects()["StatefulSet", "gateway"]["spec"]
    assert policy["podSelector"]["matchLabels"] == workload["selector"]["matchLabels"]
    rule, *own = policy["ingress"]
    (peer,) = rule["from"]
    ((label, value),) = peer["namespaceSelector"]["matchLabels"].items()
    assert f"kubectl label namespace my-agents {label}={value}" in README.read_text()
    (container,) = workload["template"]["spec"]["containers"]
    ports = {each["containerPort"] for each in container["ports"] if each["name"] == "http"}
    assert {each["port"] for each in rule["ports"]} == ports
    # In an overlay without policies this one would close the gateway to the run's own pods.
    others = [
        objects()["NetworkPolicy", name]["spec"]["ingress"] for name in ("gateway", "metrics")
    ]
    assert own == [admitted for rules in others for admitted in rules]
