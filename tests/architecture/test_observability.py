"""Dashboards and alerts name metrics that exist, are valid, and each alert has its runbook."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from forgemq_telemetry.exporters import exporter_of
from forgemq_telemetry.ports import OFFSETS, metrics_port
from forgemq_telemetry.settings import TelemetrySettings
from tests.architecture.rendered import manifests
from tests.dashboards import DASHBOARDS, HOW_TO_GET_PROMETHEUS, OBSERVABILITY, ROOT, queries
from tests.scraped import measure_all, scraped

ALERTS = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
ALERT_TESTS = yaml.safe_load((OBSERVABILITY / "alerts.test.yml").read_text(encoding="utf-8"))
PRODUCTION = ROOT / "deploy/kubernetes/overlays/production"
RUNBOOK = ROOT / "docs" / "runbook.md"
EXPRESSIONS = [
    *((f"{each.dashboard}: {each.panel}", each.expression) for each in queries()),
    *((rule["alert"], rule["expr"]) for rule in RULES),
]

SCRAPED_LABELS = {"job", "instance", "run", "process", "lane"}
"""Of the launcher's file of targets."""
SGLANG_LABELS = {"engine_type", "model_name"}
OF_PROMETHEUS = {"up": frozenset({"ended"})}
"""Of `up` also the label of the target that stands for a failed run."""
KEYWORDS = {
    "by",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "and",
    "or",
    "unless",
    "offset",
} | {"without"}
IDENTIFIER = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|on|ignoring|group_left|group_right|without) \(([^)]*)\)")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason=HOW_TO_GET_PROMETHEUS)


@cache
def exported() -> dict[str, frozenset[str]]:
    """Labels of each series that Prometheus gets, by its name there; from a real scrape."""
    exporter = exporter_of(
        TelemetrySettings(exporter="prometheus", port=0), service="merger", resource={}
    )
    assert exporter is not None
    measure_all(exporter)
    found = scraped(exporter.address)
    exporter.close()
    return found


@cache
def sglang() -> dict[str, frozenset[str]]:
    """Labels of each series of SGLang that the list names."""
    found = {}
    for line in (OBSERVABILITY / "sglang_metrics.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, kind = line.replace(":", "_").split()
        found[name] = frozenset(SGLANG_LABELS)
        if kind == "histogram":
            found[f"{name}_bucket"] = frozenset(SGLANG_LABELS | {"le"})
            found |= {f"{name}_{part}": frozenset(SGLANG_LABELS) for part in ("sum", "count")}
    return found


def known() -> dict[str, frozenset[str]]:
    return exported() | sglang() | OF_PROMETHEUS


def bare(expression: str) -> str:
    """The expression without texts, durations, selectors' labels and groupings."""
    plain = re.sub(r'"[^"]*"', "", expression)
    plain = re.sub(r"\{[^}]*\}", "", GROUPING.sub("", plain))
    return re.sub(r"\[[^]]*\]|\boffset \w+", "", plain)


def metrics_in(expression: str) -> set[str]:
    """Names of series: what is no keyword, and is not called."""
    text = bare(expression)
    return {
        match[0]
        for match in IDENTIFIER.finditer(text)
        if match[0] not in KEYWORDS and not text[match.end() :].lstrip().startswith("(")
    }


def labels_in(expression: str) -> set[str]:
    matched = " ".join(labels for _, labels in SELECTOR.findall(expression))
    named = set(re.findall(r"([a-z_]+)\s*[=!]", matched))
    grouped = ",".join(GROUPING.findall(expression))
    return named | {label.strip() for label in grouped.split(",") if label.strip()}


def test_names_are_found_in_an_expression_and_nothing_else_is():
    expression = (
        'histogram_quantile(0.9, sum by (le, job) (rate(a_bucket{run=~".*", b!="x y"}[5m]))) '
        "> (c:d offset 10m or 0 * on (run) group_left () e)"
    )
    assert metrics_in(expression) == {"a_bucket", "c:d", "e"}
    assert labels_in(expression) == {"le", "job", "run", "b"}


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_every_metric_and_label_of_a_query_exists(where: str, expression: str):
    names = metrics_in(expression)
    assert names, where
    assert names - set(known()) == set(), where
    having = SCRAPED_LABELS.union(*(known()[name] for name in names))
    assert labels_in(expression) - having == set(), where


def test_what_a_legend_shows_is_a_label_that_its_query_keeps():
    for each in queries():
        shown = set(re.findall(r"\{\{(\w+)\}\}", each.legend))
        kept = SCRAPED_LABELS.union(*(known()[name] for name in metrics_in(each.expression)))
        grouped = re.match(r"(?:sum|max) by \(([^)]*)\)", each.expression)
        if grouped:
            kept = {label.strip() for label in grouped[1].split(",")}
        assert shown <= kept, each


def test_the_listed_metrics_of_sglang_are_in_its_source():
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "srt" / "observability"
    source = (folder / "metrics_collector.py").read_text(encoding="utf-8")
    named = set(re.findall(r'name="(sglang:[a-z0-9_]+)"', source))
    listed = set(
        re.findall(
            r"^(sglang:\S+)", (OBSERVABILITY / "sglang_metrics.txt").read_text(), re.MULTILINE
        )
    )
    assert len(listed) == 9
    assert listed - named == set()


def test_what_is_listed_of_sglang_is_shown():
    shown = set().union(*(metrics_in(each.expression) for each in queries()))
    stems = {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in shown if name.startswith("sglang")
    }
    listed = {name for name in sglang() if not name.endswith(("_bucket", "_sum", "_count"))}
    assert stems == listed


@needs_promtool
def test_every_query_is_valid_promql(tmp_path: Path):
    rules = [
        {"record": f"query:{number}", "expr": each.expression}
        for number, each in enumerate(queries())
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert_promtool("check", "rules", str(path), says=f"{len(rules)} rules found")
    path.write_text(path.read_text().replace("sum by", "sum bye", 1))
    assert subprocess.run(["promtool", "check", "rules", str(path)], check=False).returncode


@needs_promtool
def test_the_configuration_and_the_alerts_are_valid():
    config = str(OBSERVABILITY / "prometheus.yml")
    assert_promtool("check", "config", config, says="1 rule files found")
    assert_promtool(
        "check", "rules", str(OBSERVABILITY / "alerts.yml"), says=f"{len(RULES)} rules found"
    )


@pytest.mark.slow
@needs_promtool
def test_each_alert_fires_for_series_that_are_wrong_and_is_silent_for_others():
    assert_promtool("test", "rules", str(OBSERVABILITY / "alerts.test.yml"), says="SUCCESS")


def test_each_alert_has_a_case_that_fires_it_and_one_that_does_not():
    cases = [case for test in ALERT_TESTS["tests"] for case in test["alert_rule_test"]]
    firing = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert firing == silent == {rule["alert"] for rule in RULES}


def assert_promtool(*arguments: str, says: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout + done.stderr


def runbook_entries() -> Iterator[tuple[str, str]]:
    """Headings of the runbook's entries and what is below each."""
    parts = re.split(r"^## (\w+)\n", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return zip(parts[1::2], parts[2::2], strict=True)


def test_each_alert_names_its_entry_of_the_runbook_and_no_entry_is_left_over():
    anchors = {f"docs/runbook.md#{heading.lower()}" for heading, _ in runbook_entries()}
    named = {rule["annotations"]["runbook"] for rule in RULES}
    assert len(named) == len(RULES)
    assert anchors == named
    for rule in RULES:
        assert rule["annotations"]["runbook"].endswith(f"#{rule['alert'].lower()}")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_each_entry_of_the_runbook_has_symptom_cause_a_look_and_a_mend():
    for heading, text in runbook_entries():
        rows = re.findall(r"^- \*\*(Symptom|Cause|Look|Mend)\*\*: \S", text, flags=re.MULTILINE)
        assert rows == ["Symptom", "Cause", "Look", "Mend"], heading
        look = text.split("**Look**")[1].split("**Mend**")[0]
        assert "`" in look, f"{heading}: no command to look with"
        assert "`" in text.split("**Mend**")[1], f"{heading}: no command to mend it"


def test_dashboards_have_unique_ids_and_panels_and_ask_the_provisioned_source():
    sources = yaml.safe_load(
        (OBSERVABILITY / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )
    [source] = sources["datasources"]
    uids = set()
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        uids.add(dashboard["uid"])
        titles = [panel["title"] for panel in dashboard["panels"]]
        assert len(set(titles)) == len(titles)
        for panel in dashboard["panels"]:
            assert panel["datasource"]["uid"] == source["uid"]
            assert panel["description"].endswith(".")
    assert uids == {"forgemq-run", "forgemq-log", "forgemq-engines"}


def test_the_example_of_targets_has_the_port_of_every_service():
    targets = json.loads((OBSERVABILITY / "example_targets.json").read_text(encoding="utf-8"))
    ports = {
        each["labels"]["job"]: int(each["targets"][0].split(":")[1])
        for each in targets
        if each["labels"]["job"] != "engine"
    }
    assert ports == {service: metrics_port(service, TelemetrySettings()) for service in OFFSETS}


def test_the_collector_takes_what_services_push_and_gives_prometheus_the_labels_of_a_scrape():
    collector = yaml.safe_load((OBSERVABILITY / "collector.yml").read_text(encoding="utf-8"))
    endpoint = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert f"http://{endpoint}" == TelemetrySettings().endpoint
    pipelines = collector["service"]["pipelines"]
    assert sorted(pipelines) == ["metrics", "traces"]
    for pipeline in pipelines.values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= set(collector[part])
    parts = collector["processors"]["transform/labels"]["metric_statements"]
    statements = {part["context"]: part["statements"] for part in parts}
    labels = re.findall(r'set\(attributes\["(\w+)"\]', " ".join(statements["datapoint"]))
    assert sorted(labels) == ["lane", "process", "run"]
    # The exporter's `job` is namespace/name, so the namespace goes.
    assert statements["resource"] == ['delete_key(attributes, "service.namespace")']


@pytest.mark.slow
def test_a_cluster_gets_the_same_alerts_and_dashboards_and_every_label_that_they_need():
    """The objects of the component, as the production overlay renders them."""
    objects = {(each["kind"], each["metadata"]["name"]): each for each in manifests(PRODUCTION)}
    assert objects["PrometheusRule", "forgemq"]["spec"] == ALERTS
    written = rule_script().rule_text()
    component = ROOT / "deploy/kubernetes/components/monitoring"
    assert (component / "alerts.yaml").read_text(encoding="utf-8") == written
    dashboards = objects["ConfigMap", "forgemq-dashboards"]
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboards["data"] == {p.name: p.read_text(encoding="utf-8") for p in DASHBOARDS}
    (endpoint,) = objects["PodMonitor", "forgemq"]["spec"]["podMetricsEndpoints"]
    made = {each.get("targetLabel") for each in endpoint["relabelings"]} - {None}
    assert made == SCRAPED_LABELS - {"instance"}


@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["production", "one-node-gpu"])
def test_prometheus_finds_a_port_of_every_service_by_the_labels_of_its_pods(overlay: str):
    path = ROOT / "deploy/kubernetes/components/monitoring/pods.yaml"
    monitor = yaml.safe_load(path.read_text())["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    found = set()
    for each in manifests(ROOT / "deploy/kubernetes/overlays" / overlay):
        template = each["spec"]["template"] if each["kind"] in {"Deployment", "StatefulSet"} else {}
        labels = template.get("metadata", {}).get("labels", {})
        if not template or not monitor["selector"]["matchLabels"].items() <= labels.items():
            continue
        containers = template["spec"]["containers"]
        if endpoint["port"] in {port["name"] for c in containers for port in c.get("ports", ())}:
            found.add(each["metadata"]["name"])
    assert found == set(OFFSETS)


def pod_monitor_rules() -> list[dict]:
    """In the form of Prometheus' own file."""
    path = ROOT / "deploy/kubernetes/components/monitoring/pods.yaml"
    (endpoint,) = yaml.safe_load(path.read_text())["spec"]["podMetricsEndpoints"]
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return [{names.get(k, k): v for k, v in rule.items()} for rule in endpoint["relabelings"]]


def page_rules() -> list[dict]:
    """Those that the page gives where there is no operator."""
    page = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\n(    kubernetes_sd_configs:.*?)```", page, flags=re.DOTALL)
    rules: list[dict] = yaml.safe_load(block)["relabel_configs"]
    return rules


def relabelled(rules: list[dict], target: dict[str, str]) -> dict[str, str] | None:
    """The labels of a target after these rules, as Prometheus applies them; None: dropped."""
    labels = dict(target)
    for rule in rules:
        found = ";".join(labels.get(name, "") for name in rule["source_labels"])
        match = re.fullmatch(rule.get("regex", "(.*)"), found)
        action = rule.get("action", "replace")
        if (action == "keep" and not match) or (action == "drop" and match):
            return None
        if action == "replace" and match:
            value = rule.get("replacement", "$1").replace("$1", r"\1")
            labels[rule["target_label"]] = match.expand(value)
    return {name: value for name, value in labels.items() if not name.startswith("__")}


@pytest.mark.parametrize("rules", [pod_monitor_rules(), page_rules()], ids=["operator", "page"])
def test_a_pods_number_is_a_lane_of_inference_alone(rules: list[dict]):
    """Gateways have numbers too, and their metrics have lanes of their own."""

    def labels(name: str, index: str, port: str = "metrics") -> dict[str, str] | None:
        of_pod = {"label_app_kubernetes_io_part_of": "forgemq", "container_port_name": port}
        of_pod |= {"label_app_kubernetes_io_name": name, "name": f"{name}-{index}"}
        of_pod |= {"label_apps_kubernetes_io_pod_index": index} if index else {}
        target = {f"__meta_kubernetes_pod_{key}": value for key, value in of_pod.items()}
        return relabelled(rules, {**target, "__meta_kubernetes_namespace": "runs"})

    assert labels("gateway", "1") == {"job": "gateway", "process": "gateway-1", "run": "runs"}
    assert labels("trainer", "0") == {"job": "trainer", "process": "trainer-0", "run": "runs"}
    assert labels("trainer", "1") is None, "its metrics follow the first one's"
    lane = {"process": "inference-1", "run": "runs", "lane": "1"}
    assert labels("inference", "1") == {"job": "inference", **lane}
    if rules == page_rules():
        assert labels("inference", "1", "engine") == {"job": "engine", **lane}


def rule_script() -> ModuleType:
    path = ROOT / "deploy/kubernetes/prometheus_rule.py"
    specification = importlib.util.spec_from_file_location("prometheus_rule", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
