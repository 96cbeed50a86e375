"""A run of the demo under a real Prometheus: no panel is empty, and no alert fires."""

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from forgemq_settings.ports import free_port
from tests.dashboards import HOW_TO_GET_PROMETHEUS, OBSERVABILITY, PanelQuery, queries
from tests.integration.launched_run import DEMO, LaunchedRun

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason=HOW_TO_GET_PROMETHEUS),
]

STEPS = 4
CHANGES = (f"trainer.steps={STEPS}", "evaluation.tasks=8", "log.keep_for_replay=false")
"""Few steps of the demo, whose records are trimmed as those of other runs."""
RESOLUTION_S = 5
MAY_BE_EMPTY = {
    ("run", "Alarms"): "no step of a healthy demo is above a threshold",
    ("log", "Bad records"): "every record decodes",
    ("log", "Refused requests"): "the demo's agents are refused nothing on a machine that is quick",
    ("engines", "Acceptance"): "the demo does not speculate",
    ("engines", "Failures"): "no engine and no fast path fails",
}
JOBS = {
    *("agents", "auditor", "console", "engine", "gateway", "inference"),
    *("merger", "reward", "scheduler", "trainer"),
}


@dataclass(frozen=True)
class Observed:
    """What Prometheus holds of a run that has ended."""

    url: str
    began_s: float
    ended_s: float

    def ask(self, expression: str) -> list[Mapping[str, Any]]:
        """The series of an expression over the whole run."""
        arguments = {
            "query": expression,
            "start": self.began_s,
            "end": self.ended_s,
            "step": RESOLUTION_S,
        }
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{query}", timeout=60) as answer:
            return list(json.load(answer)["data"]["result"])

    def has_value(self, query: PanelQuery) -> bool:
        """Whether some series of the query had a number at some moment."""
        return any(
            math.isfinite(float(value))
            for series in self.ask(query.expression)
            for _, value in series["values"]
        )


def configuration(folder: Path, *, runs: Path) -> Path:
    """The project's own configuration, for runs in this folder."""
    text = (OBSERVABILITY / "prometheus.yml").read_text(encoding="utf-8")
    parsed = yaml.safe_load(text)
    assert parsed["global"]["scrape_interval"] == f"{RESOLUTION_S}s"
    parsed["rule_files"] = [str(OBSERVABILITY / name) for name in parsed["rule_files"]]
    [discovery] = parsed["scrape_configs"][0]["file_sd_configs"]
    assert discovery["files"] == ["../../runs/scrape_targets/*.json"]
    discovery["files"] = [str(runs / "scrape_targets" / "*.json")]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(parsed), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    environ = {
        "FORGEMQ_TELEMETRY_EXPORTER": "prometheus",
        "FORGEMQ_TELEMETRY_PORT_BASE": "21400",
        **{f"FORGEMQ_AUDITOR_{what}_EVERY_S": "5" for what in ("AUDIT", "WATCH", "TRIM", "SWEEP")},
    }
    run, port = LaunchedRun(folder, environ), free_port()
    with (folder / "prometheus.log").open("wb") as log:
        prometheus = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={configuration(folder, runs=run.runs)}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        url, began_s = f"http://127.0.0.1:{port}", time.time()
        wait_until_ready(url, prometheus)
        run.start(DEMO, "run=observed", *CHANGES)
        assert run.wait_for_end(within_s=1200) == 0, run.story()
        yield Observed(url, began_s, time.time())
    finally:
        run.close()
        prometheus.terminate()
        prometheus.wait()


def wait_until_ready(url: str, prometheus: "subprocess.Popen[bytes]") -> None:
    for _ in range(300):
        assert prometheus.poll() is None, "Prometheus ended; see prometheus.log"
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except urllib.error.URLError:
            time.sleep(0.1)
    pytest.fail("Prometheus is not ready after 30 s")


def test_every_process_of_the_run_is_scraped_and_gone_when_it_has_ended(observed: Observed):
    up = {
        series["metric"]["job"]
        for series in observed.ask("up == 1")
        if series["metric"]["run"] == "observed"
    }
    assert up == JOBS


def test_no_panel_is_empty_but_those_that_a_healthy_run_on_a_cpu_cannot_have(observed: Observed):
    asked = queries()
    assert len(asked) > 60
    assert set(MAY_BE_EMPTY) < {(each.dashboard, each.panel) for each in asked}
    lacking = {
        (each.dashboard, each.panel, each.expression)
        for each in asked
        if (each.dashboard, each.panel) not in MAY_BE_EMPTY and not observed.has_value(each)
    }
    assert lacking == set()


def test_the_numbers_of_the_run_are_those_of_its_report(observed: Observed):
    [steps] = observed.ask("forgemq_run_steps_trained")
    assert float(steps["values"][-1][1]) == STEPS
    trained = observed.ask("sum(forgemq_run_groups_trained)")
    assert float(trained[0]["values"][-1][1]) == STEPS * 8
    checked = {
        series["metric"]["guarantee"] for series in observed.ask("forgemq_auditor_violations")
    }
    assert checked == {"G1", "G2", "G3", "G4", "G5"}
    assert {
        value
        for series in observed.ask("forgemq_auditor_violations")
        for _, value in series["values"]
    } == {"0"}
    stalled = observed.ask("forgemq_run_stalled")
    assert len(stalled) == 8
    assert {value for series in stalled for _, value in series["values"]} == {"0"}


def test_no_alert_fires_during_a_healthy_run(observed: Observed):
    firing = observed.ask('ALERTS{alertstate="firing"}')
    assert [series["metric"] for series in firing] == []
