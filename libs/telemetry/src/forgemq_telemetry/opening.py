"""Telemetry as the settings ask for it; without an exporter the SDK is not even imported."""

import os

from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import Telemetry


def open_telemetry(service: str, *, run: str, settings: TelemetrySettings) -> Telemetry:
    """Telemetry of one process of a run; says in one event where its measurements go.

    Raises:
        OSError: the Prometheus port is taken.
    """
    if settings.exporter == "none":
        return Telemetry(service=service)
    # Imported here: without an exporter the SDK costs neither time nor memory.
    from forgemq_telemetry.exporters import exporter_of

    resource = {"service.namespace": "forgemq", "service.name": service, "run": run}
    exporter = exporter_of(settings, resource={**resource, "service.instance.id": str(os.getpid())})
    assert exporter is not None
    telemetry = Telemetry(service=service, exporter=exporter)
    telemetry.event("exporting", exporter=settings.exporter, address=exporter.address)
    return telemetry
