"""The catalogue and the code name the same metrics."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from forgemq_telemetry.catalogue import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    CounterName,
    GaugeName,
    HistogramName,
)
from forgemq_telemetry.labels import LABELS

ROOT = Path(__file__).parents[3]
CATALOGUE = ROOT / "libs/telemetry/src/forgemq_telemetry/catalogue.py"
KINDS = [("count", COUNTERS), ("gauge", GAUGES), ("observe", HISTOGRAMS)]


def sources() -> list[str]:
    """The sources of all shipped code, except the catalogue."""
    return [
        path.read_text(encoding="utf-8")
        for folder in ("libs", "services")
        for path in (ROOT / folder).rglob("*.py")
        if path != CATALOGUE
    ]


def measured(method: str) -> set[str]:
    """First arguments of every call of this method."""
    call = re.compile(rf'telemetry\.{method}\(\s*"([a-z0-9_.]+)"')
    return {name for text in sources() for name in call.findall(text)}


@pytest.mark.parametrize(
    ("names", "rows"),
    [(CounterName, COUNTERS), (GaugeName, GAUGES), (HistogramName, HISTOGRAMS)],
    ids=["counters", "gauges", "histograms"],
)
def test_every_name_has_one_row(names: object, rows: dict):
    assert list(get_args(names)) == list(rows)


@pytest.mark.parametrize("rows", [COUNTERS, GAUGES, HISTOGRAMS])
def test_every_metric_is_measured_somewhere(rows: dict):
    code = "\n".join(sources())
    assert [name for name in rows if f'"{name}"' not in code] == [], "delete the row"


@pytest.mark.parametrize(("method", "rows"), KINDS, ids=[method for method, _ in KINDS])
def test_nothing_is_measured_that_has_no_row(method: str, rows: dict):
    assert measured(method) - set(rows) == set(), "add it to the catalogue"
    assert measured("count"), "the pattern finds no call at all"


def labels_in_code() -> dict[str, set[str]]:
    """By metric, the keyword arguments of every call that measures it."""
    found: dict[str, set[str]] = {}
    calls = (node for text in sources() for node in ast.walk(ast.parse(text)))
    for call in calls:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr in dict(KINDS) and call.args and isinstance(call.args[0], ast.Constant):
            names = {keyword.arg for keyword in call.keywords} - {"value"}
            assert None not in names, "labels are written out"
            found.setdefault(call.args[0].value, set()).update(map(str, names))
    return found


@pytest.mark.slow
def test_every_label_in_the_code_is_listed_and_no_other_one_is():
    metrics = {name for _, rows in KINDS for name in rows}
    found = {
        name: sorted(labels)
        for name, labels in labels_in_code().items()
        if labels and name in metrics
    }
    assert found == {name: sorted(labels) for name, labels in LABELS.items()}


def test_names_are_unique_and_every_row_says_unit_and_meaning():
    rows = [row for _, kind in KINDS for row in kind.items()]
    assert len({name for name, _ in rows}) == len(rows)
    for name, metric in rows:
        assert re.fullmatch(r"[a-z]+(\.[a-z0-9_]+)+", name)
        assert re.fullmatch(r"s|By|By/s|1|nat|\{[a-z_]+\}(/s)?", metric.unit), name
        assert metric.description.endswith("."), name
        assert (metric.unit == "s") == name.endswith("_s"), name
