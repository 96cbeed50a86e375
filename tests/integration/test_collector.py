"""The OpenTelemetry collector's own configuration, in a real collector before a real Prometheus."""

import json
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from forgemq_contracts import topics
from forgemq_settings.ports import free_port
from forgemq_telemetry.exporters import exporter_of
from forgemq_telemetry.settings import TelemetrySettings
from tests.dashboards import HOW_TO_GET_PROMETHEUS, OBSERVABILITY
from tests.integration.collector_program import HOW_TO_GET, PROGRAM, running_collector
from tests.integration.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.integration.prometheus_program import running_prometheus
from tests.integration.scored_run import Run, scored_run
from tests.scraped import measure_all, scraped

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PROGRAM.is_file(), reason=HOW_TO_GET),
]

ADDED = {"run", "process", "lane", "job", "instance"}
"""Labels of a file of targets; the collector's configuration makes them of the resource."""


class Pipeline:
    """A collector with the project's configuration, on ports of its own.

    Attributes:
        endpoint: Where services push.
        metrics_url: Where Prometheus scrapes.
        traces: Gets what the collector passes on.
    """

    def __init__(self, traces: OtlpReceiver) -> None:
        pushed, shown, own = free_port(), free_port(), free_port()
        self.endpoint = f"http://127.0.0.1:{pushed}"
        self.metrics_url = f"http://127.0.0.1:{shown}/metrics"
        self.traces = traces
        text = (OBSERVABILITY / "collector.yml").read_text(encoding="utf-8")
        for address, port in (("4318", pushed), ("9464", shown)):
            assert f"127.0.0.1:{address}" in text
            text = text.replace(f"127.0.0.1:{address}", f"127.0.0.1:{port}")
        text = text.replace("http://127.0.0.1:4320", traces.url)
        self.configuration = yaml.safe_load(text)
        # Its metrics about itself, which have a fixed port.
        reader = {"pull": {"exporter": {"prometheus": {"host": "127.0.0.1", "port": own}}}}
        self.configuration["service"]["telemetry"] = {"metrics": {"readers": [reader]}}


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    with otlp_receiver() as traces:
        made = Pipeline(traces)
        with running_collector(tmp_path, made.configuration, metrics_url=made.metrics_url):
            yield made


@contextmanager
def prometheus(folder: Path, pipeline: Pipeline) -> Iterator[str]:
    """A Prometheus that scrapes the collector as docs/observability.md says; yields its address."""
    target = urllib.parse.urlparse(pipeline.metrics_url).netloc
    job = {"job_name": "collector", "honor_labels": True, "static_configs": [{"targets": [target]}]}
    configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    with running_prometheus(folder, configuration) as url:
        yield url


def until_found(url: str, query: str, *, within_s: float = 60.0) -> list[dict[str, Any]]:
    """The series of an instant query, as soon as there are any."""
    address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except OSError:  # It is still starting.
            found = []
        if found:
            return found
        time.sleep(0.2)
    pytest.fail(f"{query} has no series after {within_s:g} s")


def test_every_metric_has_the_name_and_labels_of_a_scrape_behind_the_collector(
    pipeline: Pipeline,
) -> None:
    resource = {
        "service.name": "merger",
        "run": "r",
        "service.instance.id": "merger-0",
        "lane": "0",
    }
    direct = exporter_of(
        TelemetrySettings(exporter="prometheus", port=0), service="merger", resource={}
    )
    pushed = exporter_of(
        TelemetrySettings(exporter="otlp", endpoint=pipeline.endpoint),
        service="merger",
        resource=resource,
    )
    assert direct is not None
    assert pushed is not None
    measure_all(direct)
    measure_all(pushed)
    wanted = {n: labels for n, labels in scraped(direct.address).items() if n != "target_info"}
    direct.close()
    pushed.close()
    found: dict[str, frozenset[str]] = {}
    deadline_s = time.monotonic() + 30
    while wanted.keys() - found.keys() and time.monotonic() < deadline_s:
        time.sleep(0.2)
        found = scraped(pipeline.metrics_url)
    assert len(wanted) > 150
    assert {name: found.get(name) for name in wanted} == {
        name: labels | ADDED for name, labels in wanted.items()
    }


@pytest.fixture
async def run(
    new_run_id: Callable[[], str], kafka_bootstrap: str, tmp_path: Path, pipeline: Pipeline
) -> AsyncIterator[Run]:
    async with scored_run(new_run_id(), kafka_bootstrap, tmp_path) as opened:
        opened.environ["FORGEMQ_TELEMETRY_EXPORTER"] = "otlp"
        opened.environ["FORGEMQ_TELEMETRY_ENDPOINT"] = pipeline.endpoint
        opened.environ["FORGEMQ_TELEMETRY_EXPORT_EVERY_S"] = "1"
        yield opened


@pytest.mark.skipif(shutil.which("prometheus") is None, reason=HOW_TO_GET_PROMETHEUS)
async def test_what_services_push_arrives_at_prometheus_and_their_spans_are_passed_on(
    run: Run, pipeline: Pipeline, tmp_path: Path
) -> None:
    with prometheus(tmp_path, pipeline) as url:
        await run.start("reward", "merger")
        for index in (0, 1):
            await run.play("g", index)
        await run.records(topics.MERGED_GROUPS, count=1)
        name = run.configuration.run
        [graded] = until_found(
            url, f'sum(forgemq_reward_episodes_graded_total{{run="{name}"}}) == 2'
        )
        assert graded["value"][1] == "2"
        batches = until_found(url, f'forgemq_transform_batches_total{{run="{name}",job="merger"}}')
        [labels] = [each["metric"] for each in batches]
        assert labels["process"] == labels["instance"]
        assert await run.stop() == [0, 0]
    spans = {(span.service, span.name) for span in pipeline.traces.spans if span.run == name}
    assert {("reward", "grade"), ("merger", "transform")} <= spans
