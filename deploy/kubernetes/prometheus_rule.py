"""Writes the alerts of deploy/observability/alerts.yml as the object that the operator reads.

python deploy/kubernetes/prometheus_rule.py deploy/kubernetes/components/monitoring
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

ALERTS = Path(__file__).parents[1] / "observability/alerts.yml"
GENERATED = (
    "# Written by deploy/kubernetes/prometheus_rule.py from deploy/observability/alerts.yml.\n"
)


def rule_text() -> str:
    """The object as YAML."""
    made = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "forgemq"},
        "spec": yaml.safe_load(ALERTS.read_text(encoding="utf-8")),
    }
    return GENERATED + yaml.safe_dump(made, sort_keys=False, width=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write `alerts.yaml` into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    (parser.parse_args(arguments).folder / "alerts.yaml").write_text(rule_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
