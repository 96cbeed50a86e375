import io
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from forgemq_telemetry import Telemetry
from forgemq_telemetry.exporters import OpenTelemetryExporter, exporter_of
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import open_telemetry
from forgemq_telemetry.traces import (
    completion_trace,
    headers_from_http,
    headers_to_http,
    span_ids,
    trace_headers,
)

COMPLETION = "0123456789abcdef0123456789abcdef"
PARENT = (("traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"), ("tracestate", b"x=1"))


def silent() -> Telemetry:
    return Telemetry(service="merger", stream=io.StringIO())


def exporting(
    settings: TelemetrySettings | None = None,
) -> tuple[Telemetry, InMemoryMetricReader, InMemorySpanExporter]:
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    exporter = OpenTelemetryExporter(
        resource={"service.name": "merger"},
        readers=[reader],
        processors=[SimpleSpanProcessor(spans)],
        settings=settings or TelemetrySettings(),
    )
    return Telemetry(service="merger", exporter=exporter, stream=io.StringIO()), reader, spans


def test_an_event_is_one_json_line_with_its_values():
    stream = io.StringIO()
    telemetry = Telemetry(service="gateway", stream=stream, clock_ns=lambda: 1_700_000_000_123_456)
    telemetry.event("listening", port=8000, name="x\ny", ratio=float("nan"))
    assert stream.getvalue().count("\n") == 1
    assert json.loads(stream.getvalue()) == {
        "at_ms": 1_700_000_000,
        "service": "gateway",
        "event": "listening",
        "port": 8000,
        "name": "x\ny",
        "ratio": None,
    }


def test_without_an_exporter_a_span_passes_its_parents_context_on():
    with silent().span("merge", parent=(*PARENT, ("reason", b"z"))) as span:
        assert span.headers() == PARENT
    with silent().span("merge") as span:
        assert span.headers() == ()


def test_without_an_exporter_no_sdk_is_imported_and_no_thread_started():
    script = (
        "import sys, threading\n"
        "from forgemq_telemetry import Telemetry\n"
        "t = Telemetry(service='x'); t.count('transform.batches'); t.close()\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_a_completions_trace_id_is_its_request_id():
    ids = span_ids(completion_trace(COMPLETION))
    assert ids is not None
    assert f"{ids.trace_id:032x}" == COMPLETION
    assert ids.flags == 1


@pytest.mark.parametrize(
    "value",
    [b"", b"00-zz-bb-01", b"00-" + b"0" * 32 + b"-" + b"b" * 16 + b"-01", b"ff" * 40],
)
def test_a_malformed_traceparent_is_no_parent(value: bytes):
    assert span_ids((("traceparent", value),)) is None


def test_trace_context_survives_http_and_records():
    assert headers_from_http(headers_to_http(PARENT)) == PARENT
    assert trace_headers((("blob", b"1"), *PARENT)) == PARENT


def test_a_span_continues_its_parents_trace_and_names_itself_as_the_next_parent():
    telemetry, _, spans = exporting()
    with telemetry.span("merge", parent=PARENT, group_id="g-1") as span:
        inner = span_ids(span.headers())
        span.set(tokens=7)
    (finished,) = spans.get_finished_spans()
    assert inner is not None
    assert f"{inner.trace_id:032x}" == "a" * 32
    assert inner.span_id == finished.context.span_id
    assert finished.parent.span_id == int("b" * 16, 16)
    assert dict(finished.attributes) == {"group_id": "g-1", "tokens": 7}


def test_a_step_links_the_trace_of_every_completion_it_used():
    telemetry, _, spans = exporting()
    completions = [f"{number:032x}" for number in range(1, 1001)]
    completions = [text[16:] + text[16:] for text in completions]
    with telemetry.span("train_step", links=[completion_trace(c) for c in completions], step=3):
        pass
    (finished,) = spans.get_finished_spans()
    assert [f"{link.context.trace_id:032x}" for link in finished.links] == completions


def test_a_failed_span_is_marked_and_the_error_goes_on():
    telemetry, _, spans = exporting()
    with pytest.raises(KeyError), telemetry.span("merge"):
        raise KeyError("gone")
    (finished,) = spans.get_finished_spans()
    assert not finished.status.is_ok
    assert finished.events[0].name == "exception"


def test_sampling_keeps_the_same_traces_in_every_service():
    telemetry, _, spans = exporting(TelemetrySettings(sampled_fraction=0.5))
    ids = [f"{(number * 0x9E3779B97F4A7C15) % 2**64:016x}" * 2 for number in range(1, 201)]
    for _ in range(2):
        for completion_id in ids:
            with telemetry.span("generate", parent=completion_trace(completion_id)):
                pass
    kept = [f"{span.context.trace_id:032x}" for span in spans.get_finished_spans()]
    assert kept[: len(kept) // 2] == kept[len(kept) // 2 :]
    assert 60 < len(kept) // 2 < 140


def test_measurements_arrive_under_their_names():
    telemetry, reader, _ = exporting()
    telemetry.count("transform.batches")
    telemetry.count("transform.batches", 2)
    telemetry.gauge("transform.tasks", 4)
    telemetry.observe("transform.commit_s", 0.03)
    (resource,) = reader.get_metrics_data().resource_metrics
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert metrics["forgemq.transform.batches"].data.data_points[0].value == 3
    assert metrics["forgemq.transform.tasks"].data.data_points[0].value == 4
    observed = metrics["forgemq.transform.commit_s"].data.data_points[0]
    assert (observed.sum, observed.count) == (0.03, 1)
    assert observed.bucket_counts[observed.explicit_bounds.index(0.05)] == 1
    telemetry.close()


def test_prometheus_can_scrape_and_the_port_is_free_afterwards():
    settings = TelemetrySettings(exporter="prometheus", port=0)
    exporter = exporter_of(settings, service="merger", resource={"run": "r-1"})
    assert exporter is not None
    telemetry = Telemetry(service="merger", exporter=exporter)
    telemetry.count("transform.records", 5, topic="scored-groups-v1")
    with urllib.request.urlopen(exporter.address, timeout=5) as answer:
        text = answer.read().decode()
    assert 'forgemq_transform_records_total{topic="scored-groups-v1"} 5.0' in text.replace(
        'otel_scope_name="forgemq",otel_scope_schema_url="",otel_scope_version="",', ""
    )
    telemetry.close()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", urllib.parse.urlsplit(exporter.address).port))


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An HTTP server that keeps what is posted to it."""
    received: list[tuple[str, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            received.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Keep the test's output clean."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


AWAY = """
import json, sys, time
from forgemq_telemetry.telemetry import open_telemetry
from forgemq_telemetry.settings import TelemetrySettings

settings = TelemetrySettings(exporter="otlp", endpoint=sys.argv[1], export_every_s=0.2)
telemetry = open_telemetry("merger", run="r", settings=settings)
marks_s = [time.monotonic()]
for _ in range(5000):  # the SDK keeps 2048 and drops the rest
    with telemetry.span("merge"):
        telemetry.count("transform.batches")
marks_s.append(time.monotonic())
time.sleep(1.5)  # several attempts fail
marks_s.append(time.monotonic())
telemetry.close()
marks_s.append(time.monotonic())
print(json.dumps({"work_s": marks_s[1] - marks_s[0], "close_s": marks_s[3] - marks_s[2]}))
"""


@contextmanager
def absent_collectors() -> Iterator[dict[str, str]]:
    """Two addresses: one refuses connections, one accepts them and never answers."""
    with socket.socket() as closed, socket.socket() as silent:
        for listener in (closed, silent):
            listener.bind(("127.0.0.1", 0))
        silent.listen()
        yield {
            name: f"http://127.0.0.1:{listener.getsockname()[1]}"
            for name, listener in {"refused": closed, "never answers": silent}.items()
        }


@pytest.mark.slow
def test_a_collector_that_is_away_costs_no_work_and_three_seconds_at_the_end():
    """Both cases at the same time, because each takes seconds of waiting."""
    with absent_collectors() as urls:
        services = {
            name: subprocess.Popen(
                [sys.executable, "-c", AWAY, url],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, url in urls.items()
        }
        try:
            done = {
                name: (*service.communicate(timeout=50), service.returncode)
                for name, service in services.items()
            }
        finally:
            for service in services.values():
                service.kill()
    for name, (answer, errors, status) in done.items():
        assert status == 0, (name, errors)
        took = json.loads(answer)
        assert took["work_s"] < 5, name
        assert took["close_s"] < 4, name
        warnings = [line for line in errors.splitlines() if not line.startswith("{")]
        # One line a sender, not one an attempt, and one at the end.
        assert len(warnings) <= 5, (name, warnings)


def test_otlp_sends_spans_and_metrics_before_it_closes():
    with collector() as (endpoint, received):
        settings = TelemetrySettings(exporter="otlp", endpoint=endpoint)
        exporter = exporter_of(settings, service="merger", resource={"service.name": "merger"})
        telemetry = Telemetry(service="merger", exporter=exporter)
        telemetry.count("transform.batches")
        with telemetry.span("merge", parent=completion_trace(COMPLETION)):
            pass
        telemetry.close()
    assert {path for path, _ in received} == {"/v1/traces", "/v1/metrics"}
    body = next(body for path, body in received if path == "/v1/traces")
    request = ExportTraceServiceRequest.FromString(body)
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert span.trace_id.hex() == COMPLETION
    assert b"forgemq.transform.batches" in next(b for path, b in received if path == "/v1/metrics")


@pytest.mark.parametrize("instance", ["", "merger-1"])
def test_what_a_process_pushes_has_its_name_or_that_of_its_host_with_its_number(instance: str):
    """The number alone is that of every other replica in a container."""
    with collector() as (endpoint, received):
        settings = TelemetrySettings(exporter="otlp", endpoint=endpoint)
        telemetry = open_telemetry("merger", run="r", settings=settings, instance=instance)
        with telemetry.span("merge"):
            pass
        telemetry.close()
    (body,) = (body for path, body in received if path == "/v1/traces")
    resource = ExportTraceServiceRequest.FromString(body).resource_spans[0].resource
    found = {each.key: each.value.string_value for each in resource.attributes}
    own = f"{socket.gethostname()}-{os.getpid()}"
    assert found["service.instance.id"] == (instance or own)
