"""What KEDA learns of open episodes: a gateway's metrics endpoint behind a real Prometheus."""

import json
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from forgemq_gateway.ticks import measure_groups
from forgemq_telemetry.exporters import exporter_of
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import Telemetry
from tests.dashboards import HOW_TO_GET_PROMETHEUS, ROOT
from tests.integration.prometheus_program import running_prometheus
from tests.unit.gateway.test_abandoned import scene_of
from tests.unit.gateway.test_held_and_leased import INDICES
from tests.unit.gateway.test_measured_groups import GROUPS, admit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason=HOW_TO_GET_PROMETHEUS),
]

SCALING = ROOT / "deploy/kubernetes/overlays/production/scaling.yaml"


def query_for_agents() -> str:
    every = yaml.safe_load_all(SCALING.read_text(encoding="utf-8"))
    (agents,) = (each for each in every if each["metadata"]["name"] == "agents")
    return agents["spec"]["triggers"][0]["metadata"]["query"]


@contextmanager
def prometheus(folder: Path, *endpoints: str) -> Iterator[str]:
    """A Prometheus that scrapes these pods of one namespace; yields its address."""
    targets = [urllib.parse.urlparse(endpoint).netloc for endpoint in endpoints]
    pods = [{"targets": [t], "labels": {"run": "forgemq", "process": t}} for t in targets]
    configuration = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "gateway", "static_configs": pods}],
    }
    with running_prometheus(folder, configuration) as url:
        yield url


def asked(url: str, query: str) -> list[dict[str, Any]]:
    """The result of an instant query, as KEDA asks it; [] while Prometheus starts."""
    address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except OSError:
        return []


def until(url: str, query: str, value: float) -> list[dict[str, Any]]:
    """The result once its only element has this value, or the newest one after 60 s."""
    deadline_s = time.monotonic() + 60
    while True:
        found = asked(url, query)
        is_there = [float(each["value"][1]) for each in found] == [value]
        if is_there or time.monotonic() > deadline_s:
            return found
        time.sleep(0.2)


async def test_the_query_for_agents_has_one_answer_the_open_episodes_of_all_gateways(
    tmp_path: Path,
) -> None:
    settings = TelemetrySettings(exporter="prometheus", port=0)
    exporters = [exporter_of(settings, service="gateway", resource={}) for _ in range(2)]
    query = query_for_agents()
    try:
        async with scene_of(tmp_path) as one, scene_of(tmp_path) as other:
            one.context.gateways.serving = {0}
            other.context.gateways.serving = {1, 2}
            measured = [
                replace(scene.context, telemetry=Telemetry(service="gateway", exporter=exporter))
                for scene, exporter in zip((one, other), exporters, strict=True)
            ]
            for scene in (one, other):
                admit(scene)
            with prometheus(tmp_path, *(each.address for each in exporters)) as url:
                assert asked(url, query) == []
                for context in measured:
                    measure_groups(context)
                total = GROUPS * INDICES
                (found,) = until(url, query, total)
                assert float(found["value"][1]) == total
                for context in measured:
                    for group in context.registry.groups.values():
                        group.finished = {0: "ended", 1: "ended"}
                    measure_groups(context)
                (found,) = until(url, query, GROUPS * (INDICES - 2))
                assert float(found["value"][1]) == GROUPS * (INDICES - 2)
    finally:
        for exporter in exporters:
            exporter.close()
