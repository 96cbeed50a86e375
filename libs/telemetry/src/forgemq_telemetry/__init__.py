"""Events, metrics and traces of a service; one catalogue names all metrics."""

from forgemq_telemetry.telemetry import Span, Telemetry

__all__ = ["Span", "Telemetry"]
