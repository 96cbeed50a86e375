"""Every service has a metrics port of its own, and a port that is taken is refused by name."""

import socket
from pathlib import Path

import pytest

from forgemq_settings.environment import SettingsError, parse
from forgemq_telemetry.ports import OFFSETS, metrics_port
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import open_telemetry

ROOT = Path(__file__).parents[3]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir())
SCRAPED = TelemetrySettings(exporter="prometheus")


def ports(service: str, *, processes: int) -> list[int]:
    return [metrics_port(service, TelemetrySettings(number=number)) for number in range(processes)]


def test_every_service_but_the_launcher_has_a_place():
    assert sorted(OFFSETS) == [name for name in SERVICES if name != "launcher"]


def test_ten_processes_of_each_service_and_a_hundred_lanes_never_collide():
    taken = [
        port
        for service in OFFSETS
        for port in ports(service, processes=100 if service == "inference" else 10)
    ]
    assert len(set(taken)) == len(taken) == 180
    assert (min(taken), max(taken)) == (9620, 9799)


def test_a_second_process_and_a_second_run_have_other_ports():
    assert metrics_port("scheduler", SCRAPED) == 9680
    assert metrics_port("scheduler", TelemetrySettings(number=1)) == 9681
    assert metrics_port("inference", TelemetrySettings(number=3, port_base=9800)) == 9903


def test_a_port_that_is_named_is_taken_and_a_service_without_a_place_takes_any():
    assert metrics_port("scheduler", TelemetrySettings(port=1234, number=99)) == 1234
    assert metrics_port("scheduler", TelemetrySettings(port=0)) == 0
    assert metrics_port("somebody's own", SCRAPED) == 0


def test_more_processes_than_a_service_has_ports_are_refused_by_the_setting():
    with pytest.raises(SettingsError, match=r"^FORGEMQ_TELEMETRY_NUMBER: merger has 10 ports"):
        metrics_port("merger", TelemetrySettings(number=10))


def test_a_taken_port_is_refused_and_names_the_settings_that_choose_another():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        settings = parse(
            TelemetrySettings,
            prefix="FORGEMQ_TELEMETRY_",
            environ={
                "FORGEMQ_TELEMETRY_EXPORTER": "prometheus",
                "FORGEMQ_TELEMETRY_PORT": str(port),
            },
        )
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port} .*FORGEMQ_TELEMETRY_PORT_BASE"):
            open_telemetry("scheduler", run="r-1", settings=settings)


def test_the_documents_list_every_port():
    text = (ROOT / "libs/telemetry/README.md").read_text(encoding="utf-8")
    for service in OFFSETS:
        last = metrics_port(service, SCRAPED) + (99 if service == "inference" else 9)
        assert f"| {service} | {metrics_port(service, SCRAPED)}-{last} |" in text
