"""Every query that a dashboard asks, read from the files that Grafana reads."""

import json
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OBSERVABILITY = ROOT / "deploy" / "observability"
DASHBOARDS = sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json"))
HOW_TO_GET_PROMETHEUS = (
    "no Prometheus: apt-get install -y --no-install-recommends prometheus (docs/observability.md)"
)


class PanelQuery(NamedTuple):
    """One query of one panel, with Grafana's variables filled in."""

    dashboard: str
    panel: str
    legend: str
    expression: str


def queries() -> list[PanelQuery]:
    return [
        PanelQuery(
            dashboard=path.stem,
            panel=panel["title"],
            legend=target["legendFormat"],
            expression=target["expr"]
            .replace("$__rate_interval", "1m")
            .replace('run=~"$run"', 'run=~".*"'),
        )
        for path in DASHBOARDS
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
        for target in panel["targets"]
    ]
