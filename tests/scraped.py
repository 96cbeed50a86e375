"""Every metric that services can export, and what Prometheus gets of them from an address."""

import re
import urllib.request

from forgemq_telemetry.catalogue import COUNTERS, GAUGES, HISTOGRAMS
from forgemq_telemetry.labels import LABELS
from forgemq_telemetry.telemetry import Exporter

LABEL = re.compile(r'([a-z_]+)="([^"]*)"')
SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")


def scraped(url: str) -> dict[str, frozenset[str]]:
    """The labels of each series that has any, by its name."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        match[1]: frozenset(re.findall(r'([a-z_]+)="', match[2]))
        for line in lines
        if (match := SERIES.match(line))
    }


def samples(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    """The labels and the value of each sample with this name."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    matching = [line for line in lines if re.match(rf"{name}[{{ ]", line)]
    return [(dict(LABEL.findall(line)), float(line.rsplit(" ", 1)[1])) for line in matching]


def measure_all(exporter: Exporter) -> None:
    """Give the exporter one measurement of each metric of the catalogue, with all its labels."""
    for counter in COUNTERS:
        exporter.count(counter, 1, dict.fromkeys(LABELS.get(counter, ()), "x"))
    for gauge in GAUGES:
        exporter.gauge(gauge, 1, dict.fromkeys(LABELS.get(gauge, ()), "x"))
    for histogram in HISTOGRAMS:
        exporter.observe(histogram, 1, dict.fromkeys(LABELS.get(histogram, ()), "x"))
