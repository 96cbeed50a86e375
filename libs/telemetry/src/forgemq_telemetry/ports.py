"""The port at which Prometheus finds each service on a machine.

Ports are fixed, so that one scrape configuration fits every run. Each service has ten of its own,
inference has a hundred: processes of one service on one machine differ by their number among them.
"""

from forgemq_settings.environment import SettingsError
from forgemq_telemetry.settings import TelemetrySettings

OFFSETS: dict[str, int] = {
    "agents": 20,
    "auditor": 30,
    "console": 40,
    "gateway": 50,
    "merger": 60,
    "reward": 70,
    "scheduler": 80,
    "trainer": 90,
    "inference": 100,
}
"""From the port base to the first port of each service."""

_WIDTHS = {"inference": 100}
_WIDTH = 10


def metrics_port(service: str, settings: TelemetrySettings) -> int:
    """Where the metrics of this process are; 0, any free port, for a service without a place.

    Example: lane 3 of inference has port 9703; with a port base of 9800 it has 9903.

    Raises:
        SettingsError: the service has no such number on one machine, or no such port exists.
    """
    if settings.port is not None:
        return settings.port
    if service not in OFFSETS:
        return 0
    width = _WIDTHS.get(service, _WIDTH)
    if settings.number >= width:
        raise SettingsError(
            f"FORGEMQ_TELEMETRY_NUMBER: {service} has {width} ports, so it must be below {width}; "
            "set FORGEMQ_TELEMETRY_PORT for more on one machine"
        )
    return settings.port_base + OFFSETS[service] + settings.number
