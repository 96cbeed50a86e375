"""Events, metrics and spans of a service.

Only shells and edges use it, never a core. Without an exporter an event is still one JSON line on
stderr, a metric costs one comparison, and a span only passes its parent's context on.

    telemetry = Telemetry(service="gateway")
    telemetry.event("listening", port=8000)
    telemetry.count("transform.records", 3, topic="scored-groups-v1")
    with telemetry.span("generate", parent=record.headers, lane=0) as span:
        emit = Emit(..., headers=span.headers())
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TextIO

import msgspec

from forgemq_telemetry.catalogue import Attribute, CounterName, GaugeName, HistogramName
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.traces import Headers, trace_headers


class Span(Protocol):
    """Work in progress, as part of one trace."""

    def headers(self) -> Headers:
        """Trace context for the records and HTTP requests that this work causes."""
        ...

    def set(self, **attributes: Attribute) -> None:
        """Add attributes that were not known at the start."""
        ...


class Exporter(Protocol):
    """Sends measurements and spans; `forgemq_telemetry.exporters` implements it."""

    def count(self, metric: CounterName, value: float, attributes: dict[str, Attribute]) -> None:
        """Add to a counter."""
        ...

    def gauge(self, metric: GaugeName, value: float, attributes: dict[str, Attribute]) -> None:
        """Set a gauge."""
        ...

    def observe(
        self, metric: HistogramName, value: float, attributes: dict[str, Attribute]
    ) -> None:
        """Add one observation to a histogram."""
        ...

    def start_span(
        self,
        name: str,
        *,
        parent: Headers,
        links: Sequence[Headers],
        attributes: dict[str, Attribute],
    ) -> "StartedSpan":
        """Begin a span; a root span if `parent` has no trace context."""
        ...

    def close(self) -> None:
        """Send what is buffered, within a few seconds, and stop."""
        ...


class StartedSpan(Span, Protocol):
    """A span that its exporter began and `Telemetry.span` ends."""

    def end(self, error: BaseException | None) -> None:
        """End the span; with the error if the work failed."""
        ...


class _PassingSpan:
    """The span without an exporter: passes the parent's context on unchanged."""

    __slots__ = ("_parent",)

    def __init__(self, parent: Headers) -> None:
        self._parent = parent

    def headers(self) -> Headers:
        return trace_headers(self._parent)

    def set(self, **attributes: Attribute) -> None:
        del attributes


class Telemetry:
    """Events, metrics and spans of one service.

    Args:
        service: Name on every line and in every exported resource.
        exporter: None: nothing is exported.
        stream: Gets the events, one JSON object a line; None: stderr.
        clock_ns: Wall clock of the events, nanoseconds since the Unix epoch.
    """

    def __init__(
        self,
        *,
        service: str,
        exporter: Exporter | None = None,
        stream: TextIO | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.service = service
        self._exporter = exporter
        self._stream = stream if stream is not None else sys.stderr
        self._clock_ns = clock_ns

    @property
    def is_exporting(self) -> bool:
        """Whether measurements are exported."""
        return self._exporter is not None

    def event(self, name: str, /, **fields: object) -> None:
        """Write one JSON line with the name and the fields."""
        line = {"at_ms": self._clock_ns() // 1_000_000, "service": self.service, "event": name}
        text = msgspec.json.encode({**line, **fields}, enc_hook=str).decode()
        self._stream.write(text + "\n")
        self._stream.flush()

    def count(self, metric: CounterName, /, value: float = 1, **attributes: Attribute) -> None:
        """Add to a counter; `value` is at least 0."""
        if self._exporter is not None:
            self._exporter.count(metric, value, attributes)

    def gauge(self, metric: GaugeName, /, value: float, **attributes: Attribute) -> None:
        """Set a gauge."""
        if self._exporter is not None:
            self._exporter.gauge(metric, value, attributes)

    def observe(self, metric: HistogramName, /, value: float, **attributes: Attribute) -> None:
        """Add one observation to a histogram."""
        if self._exporter is not None:
            self._exporter.observe(metric, value, attributes)

    def span(
        self,
        name: str,
        /,
        *,
        parent: Headers = (),
        links: Sequence[Headers] = (),
        **attributes: Attribute,
    ) -> AbstractContextManager[Span]:
        """Span the work inside; an exception that leaves it marks the span as failed.

        Args:
            name: Of the kind of work, the same for every item.
            parent: Headers of the record or request that caused it; () starts a trace.
            links: Headers of other traces that this work used, e.g. `completion_trace(id)` of
                every completion in an optimizer step.
            attributes: Values known at the start, searchable in the trace store.
        """
        if self._exporter is None:
            return nullcontext(_PassingSpan(parent))
        return _ending(
            self._exporter.start_span(name, parent=parent, links=links, attributes=attributes)
        )

    def close(self) -> None:
        """Send what is buffered and stop the exporter; events still work."""
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None


@contextmanager
def _ending(span: StartedSpan) -> Iterator[Span]:
    """End the span with the work inside."""
    try:
        yield span
    except BaseException as error:
        # The work inside may raise anything, a cancellation too: each ends the span as failed.
        span.end(error)
        raise
    span.end(None)


def open_telemetry(
    service: str,
    *,
    run: str,
    settings: TelemetrySettings,
    instance: str = "",
    lane: str = "",
) -> Telemetry:
    """Telemetry of one process of a run; an event says where its measurements go.

    Args:
        service: Name on every line and in every exported resource.
        run: Id of the run.
        settings: Say which exporter there is.
        instance: Of this process among those of the service, the same after a restart: what it
            pushes then goes on in the same series. "": the host's name and the process id.
        lane: The one that the process serves; "" if it serves none.

    Raises:
        SettingsError: the Prometheus port is taken, or the service has no such port.
    """
    if settings.exporter == "none":
        return Telemetry(service=service)
    # Imported here: without an exporter the SDK costs neither time nor memory.
    from forgemq_telemetry.exporters import exporter_of

    resource = {"service.namespace": "forgemq", "service.name": service, "run": run}
    resource |= {"lane": lane} if lane else {}
    exporter = exporter_of(
        settings,
        service=service,
        # In a container the process id alone is that of every other replica.
        resource={
            **resource,
            "service.instance.id": instance or f"{socket.gethostname()}-{os.getpid()}",
        },
    )
    assert exporter is not None
    telemetry = Telemetry(service=service, exporter=exporter)
    telemetry.event("exporting", exporter=settings.exporter, address=exporter.address)
    return telemetry
