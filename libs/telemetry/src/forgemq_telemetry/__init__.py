"""Traces, metrics and log lines with one catalogue of names."""

from forgemq_telemetry.telemetry import Span, Telemetry

__all__ = ["Span", "Telemetry"]
