"""Exports telemetry through OpenTelemetry's SDK: OTLP over HTTP, or Prometheus.

Imported only if the settings name an exporter: the SDK costs time, memory and threads.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import Counter, Histogram, Meter
from opentelemetry.metrics import _Gauge as Gauge
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from forgemq_settings.environment import SettingsError
from forgemq_telemetry.catalogue import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    Attribute,
    CounterName,
    GaugeName,
    HistogramName,
)
from forgemq_telemetry.ports import metrics_port
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.traces import Headers, SpanIds, span_ids, traceparent

_SHUTDOWN_S = 3.0  # A collector that works takes milliseconds; see `close`.
_PREFIX = "forgemq."
# These loggers report every failed attempt, several in ten seconds while a collector is away.
_SENDERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.sdk._shared_internal",
)
_WARN_EVERY_S = 60.0
# Three a decade, from one record's handling to one optimizer step; the SDK's default is in ms.
_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
)


class OpenTelemetryExporter:
    """Measurements and spans through OpenTelemetry's SDK.

    Args:
        resource: Attributes of every exported item: service, run, process.
        readers: Export the metrics; (): none are exported.
        processors: Export the spans; (): none are exported, but their context is passed on.
        settings: Sampling and limits.
        address: Of the collector, or of the page that Prometheus scrapes.
        on_close: Called last, e.g. to free a port.
    """

    def __init__(
        self,
        *,
        resource: dict[str, Attribute],
        readers: Sequence[MetricReader],
        processors: Sequence[SpanProcessor],
        settings: TelemetrySettings,
        address: str = "",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self._meters = MeterProvider(readers, Resource.create(resource), shutdown_on_exit=False)
        self._tracers = TracerProvider(
            # By trace id, not by the parent's flag: every service then keeps the same traces.
            sampler=TraceIdRatioBased(settings.sampled_fraction),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_links=settings.links_max),
        )
        for processor in processors:
            self._tracers.add_span_processor(processor)
        self._tracer = self._tracers.get_tracer("forgemq")
        meter = self._meters.get_meter("forgemq")
        self._counters = _counters(meter)
        self._gauges = _gauges(meter)
        self._histograms = _histograms(meter)
        self._on_close = on_close

    def count(self, metric: CounterName, value: float, attributes: dict[str, Attribute]) -> None:
        """Add to a counter."""
        self._counters[metric].add(value, attributes)

    def gauge(self, metric: GaugeName, value: float, attributes: dict[str, Attribute]) -> None:
        """Set a gauge."""
        self._gauges[metric].set(value, attributes)

    def observe(
        self, metric: HistogramName, value: float, attributes: dict[str, Attribute]
    ) -> None:
        """Add one observation to a histogram."""
        self._histograms[metric].record(value, attributes)

    def start_span(
        self,
        name: str,
        *,
        parent: Headers,
        links: Sequence[Headers],
        attributes: dict[str, Attribute],
    ) -> "_ExportedSpan":
        """Begin a span; a root span if `parent` has no trace context."""
        context = Context()
        if (ids := span_ids(parent)) is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(_span_context(ids)), context)
        linked = [
            trace.Link(_span_context(ids))
            for headers in links
            if (ids := span_ids(headers)) is not None
        ]
        return _ExportedSpan(
            self._tracer.start_span(name, context=context, links=linked, attributes=attributes)
        )

    def close(self) -> None:
        """Send what is buffered and stop the SDK's threads.

        What the collector does not accept within 3 s is lost: the SDK would retry for half a
        minute, whatever its time limits say.
        """
        closing = [
            threading.Thread(target=self._tracers.shutdown, daemon=True),
            threading.Thread(target=self._meters.shutdown, args=(_SHUTDOWN_S * 1000,), daemon=True),
        ]
        deadline_s = time.monotonic() + _SHUTDOWN_S
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._on_close is not None:
            self._on_close()


class _ExportedSpan:
    """One span of the SDK."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def headers(self) -> Headers:
        context = self._span.get_span_context()
        return traceparent(SpanIds(context.trace_id, context.span_id, int(context.trace_flags)))

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(trace.StatusCode.ERROR, type(error).__name__)
        self._span.end()


def exporter_of(
    settings: TelemetrySettings, *, service: str, resource: dict[str, Attribute]
) -> OpenTelemetryExporter | None:
    """Make the exporter that the settings name; None for `none`.

    Raises:
        SettingsError: the Prometheus port is taken, or the service has no such port.
    """
    if settings.exporter == "none":
        return None
    if settings.exporter == "otlp":
        return _otlp(settings, resource)
    return _scraped(settings, metrics_port(service, settings), resource)


def _otlp(settings: TelemetrySettings, resource: dict[str, Attribute]) -> OpenTelemetryExporter:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    address = settings.endpoint.rstrip("/")
    loggers = [logging.getLogger(name) for name in _SENDERS]
    limit = _WarningLimit()
    for logger in loggers:
        logger.addFilter(limit)

    def remove_filters() -> None:
        for logger in loggers:
            logger.removeFilter(limit)

    metrics = OTLPMetricExporter(endpoint=f"{address}/v1/metrics")
    spans = OTLPSpanExporter(endpoint=f"{address}/v1/traces")
    return OpenTelemetryExporter(
        resource=resource,
        readers=[PeriodicExportingMetricReader(metrics, settings.export_every_s * 1000)],
        processors=[BatchSpanProcessor(spans)],
        settings=settings,
        address=address,
        on_close=remove_filters,
    )


class _WarningLimit(logging.Filter):
    """Lets one record of each logger pass per interval: a collector may be away for hours."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s - self._passed_s.get(record.name, float("-inf")) < _WARN_EVERY_S:
            return False
        self._passed_s[record.name] = now_s
        return True


def _scraped(
    settings: TelemetrySettings, port: int, resource: dict[str, Attribute]
) -> OpenTelemetryExporter:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry)
    try:
        server, thread = start_http_server(port, addr=settings.host, registry=registry)
    except OSError as error:
        raise SettingsError(
            f"metrics cannot be served at {settings.host}:{port} ({error.strerror}): set "
            "FORGEMQ_TELEMETRY_NUMBER for a second process of the service on this machine, "
            "FORGEMQ_TELEMETRY_PORT_BASE for a second run, or FORGEMQ_TELEMETRY_PORT"
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return OpenTelemetryExporter(
        resource=resource,
        readers=[reader],
        processors=[],
        settings=settings,
        address=f"http://{settings.host}:{server.server_port}/metrics",
        on_close=stop,
    )


def _span_context(ids: SpanIds) -> trace.SpanContext:
    return trace.SpanContext(
        ids.trace_id, ids.span_id, is_remote=True, trace_flags=trace.TraceFlags(ids.flags)
    )


def _counters(meter: Meter) -> dict[CounterName, Counter]:
    return {
        name: meter.create_counter(_PREFIX + name, metric.unit, metric.description)
        for name, metric in COUNTERS.items()
    }


def _gauges(meter: Meter) -> dict[GaugeName, Gauge]:
    return {
        name: meter.create_gauge(_PREFIX + name, metric.unit, metric.description)
        for name, metric in GAUGES.items()
    }


def _histograms(meter: Meter) -> dict[HistogramName, Histogram]:
    return {
        name: meter.create_histogram(
            _PREFIX + name,
            metric.unit,
            metric.description,
            # The SDK's default bounds are in milliseconds: durations here are in seconds.
            explicit_bucket_boundaries_advisory=_BOUNDS_S if metric.unit == "s" else None,
        )
        for name, metric in HISTOGRAMS.items()
    }
