"""A collector in the test's own process: takes OTLP over HTTP and keeps every span."""

import gzip
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, TypeAlias

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


class SpanId(NamedTuple):
    """One span in one trace, both in hexadecimal."""

    trace: str
    span: str


@dataclass(frozen=True, kw_only=True)
class ReceivedSpan:
    """A finished span, and the service that sent it; `lane` is "" if that serves none."""

    service: str
    run: str
    instance: str
    lane: str
    name: str
    id: SpanId
    parent: str
    links: frozenset[SpanId]
    attributes: dict[str, str | int]
    began_ns: int
    ended_ns: int

    @property
    def linked_traces(self) -> frozenset[str]:
        """Trace ids of all spans that it links."""
        return frozenset(link.trace for link in self.links)


Counter: TypeAlias = tuple[str, frozenset[tuple[str, str | int]]]
"""A counter's name and attributes."""


class OtlpReceiver:
    """Lifecycle: give `url` to services, let them end, read `spans`, `metrics` and `counted`."""

    def __init__(self) -> None:
        self.url = ""
        self.metrics: set[tuple[str, str]] = set()
        self._spans: dict[SpanId, ReceivedSpan] = {}
        self._counted: dict[Counter, dict[int, float]] = {}
        self._lock = threading.Lock()

    @property
    def spans(self) -> Sequence[ReceivedSpan]:
        """All spans received so far, each once.

        An exporter whose request was answered too late sends it again.
        """
        with self._lock:
            return tuple(self._spans.values())

    def counted(self, metric: str) -> Mapping[frozenset[tuple[str, str | int]], float]:
        """Values of a counter by its attributes, summed over the processes that had it."""
        with self._lock:
            return {
                attributes: sum(by_start.values())
                for (name, attributes), by_start in self._counted.items()
                if name == metric
            }

    def take(self, path: str, body: bytes) -> None:
        """Take one request of an exporter."""
        with self._lock:
            if path == "/v1/traces":
                self._take_spans(ExportTraceServiceRequest.FromString(body))
            elif path == "/v1/metrics":
                self._take_metrics(ExportMetricsServiceRequest.FromString(body))

    def _take_spans(self, request: ExportTraceServiceRequest) -> None:
        for sent in request.resource_spans:
            resource = _attributes(sent.resource.attributes)
            for span in (span for scope in sent.scope_spans for span in scope.spans):
                received = SpanId(span.trace_id.hex(), span.span_id.hex())
                self._spans[received] = ReceivedSpan(
                    service=str(resource["service.name"]),
                    run=str(resource["run"]),
                    instance=str(resource["service.instance.id"]),
                    lane=str(resource.get("lane", "")),
                    name=span.name,
                    id=received,
                    parent=span.parent_span_id.hex(),
                    links=frozenset(
                        SpanId(link.trace_id.hex(), link.span_id.hex()) for link in span.links
                    ),
                    attributes=_attributes(span.attributes),
                    began_ns=span.start_time_unix_nano,
                    ended_ns=span.end_time_unix_nano,
                )

    def _take_metrics(self, request: ExportMetricsServiceRequest) -> None:
        for sent in request.resource_metrics:
            service = str(_attributes(sent.resource.attributes)["service.name"])
            for metric in (metric for scope in sent.scope_metrics for metric in scope.metrics):
                self.metrics.add((service, metric.name))
                for point in metric.sum.data_points:
                    key = metric.name, frozenset(_attributes(point.attributes).items())
                    # Each process counts from its own start.
                    value = point.as_double or float(point.as_int)
                    self._counted.setdefault(key, {})[point.start_time_unix_nano] = value


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, str | int]:
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in pairs}


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver on a free port of this machine."""
    receiver = OtlpReceiver()

    class Requests(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_zipped = self.headers.get("content-encoding") == "gzip"
            receiver.take(self.path, gzip.decompress(body) if is_zipped else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Log nothing, so that the test's output stays clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
