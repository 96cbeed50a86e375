"""Metrics of a service in one process, read without a server."""

import io
from collections import Counter
from collections.abc import Callable, Mapping

from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from forgemq_telemetry.exporters import OpenTelemetryExporter
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import Telemetry

Labels = tuple[tuple[str, str | int], ...]
Held = Mapping[tuple[str, Labels], float]


def metered(service: str) -> tuple[Telemetry, Callable[[], Held]]:
    """A telemetry, and a function that says what it holds by metric and labels."""
    reader = InMemoryMetricReader()
    exporter = OpenTelemetryExporter(
        resource={}, readers=[reader], processors=[], settings=TelemetrySettings()
    )

    def held() -> Held:
        data = reader.get_metrics_data()
        return {
            (metric.name.removeprefix("forgemq."), tuple(sorted(point.attributes.items()))): (
                point.value
            )
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
            if isinstance(point, NumberDataPoint)
        }

    return Telemetry(service=service, exporter=exporter, stream=io.StringIO()), held


def counted(held: Held, metric: str, *, by: str) -> Counter[str]:
    """What a counter holds, by the values of one of its labels."""
    found: Counter[str] = Counter()
    for (name, labels), value in held.items():
        if name == metric:
            found[str(dict(labels)[by])] += int(value)
    return found
