"""Metrics of a service in one process, read without a server."""

import io
from collections.abc import Callable

from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from forgemq_telemetry.exporters import OpenTelemetryExporter
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import Telemetry

Labels = tuple[tuple[str, str | int], ...]


def metered(service: str) -> tuple[Telemetry, Callable[[], dict[tuple[str, Labels], float]]]:
    """A telemetry, and a function that says what it holds by metric and labels."""
    reader = InMemoryMetricReader()
    exporter = OpenTelemetryExporter(
        resource={}, readers=[reader], processors=[], settings=TelemetrySettings()
    )

    def held() -> dict[tuple[str, Labels], float]:
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
