"""Prometheus finds every process of a run in a file of its folder."""

import json
from pathlib import Path

import msgspec
import pytest

from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.run_setup import RunSetup
from forgemq_launcher.settings import LauncherSettings
from forgemq_launcher.upkeep.run_processes import RunProcesses
from forgemq_launcher.upkeep.scrape_targets import failed_target, scrape_targets, write_targets
from forgemq_launcher.upkeep.services import service_specs
from tests.unit.launcher.test_services import ADDRESSES, PLAYED, configuration

TWO_LANES = msgspec.structs.replace(
    ADDRESSES,
    engine_urls=("http://127.0.0.1:30000", "http://other:31000"),
    prefill_urls=("", "http://other:31001"),
)


def targets_of(folder: Path, **environ: str):
    specs = service_specs(
        configuration(PLAYED),
        folder=RunFolder(folder),
        addresses=TWO_LANES,
        environ={f"FORGEMQ_TELEMETRY_{name}": value for name, value in environ.items()},
        gateways=2,
    )
    return scrape_targets(specs, run="desk-1")


def test_each_process_is_there_once_with_its_port_job_run_and_lane(tmp_path: Path):
    found = {each.targets[0]: each.labels for each in targets_of(tmp_path, EXPORTER="prometheus")}
    assert sorted(found) == sorted(
        [f"127.0.0.1:{port}" for port in (9620, 9630, 9640, 9650, 9651, 9660, 9670, 9680, 9690)]
        + ["127.0.0.1:9700", "127.0.0.1:9701"]
        + ["127.0.0.1:30000", "other:31000", "other:31001"]
    )
    assert found["127.0.0.1:9651"] == {"job": "gateway", "process": "gateway-1", "run": "desk-1"}
    assert found["other:31001"] == {"job": "engine", "run": "desk-1", "lane": "1"}
    assert found["127.0.0.1:9700"]["lane"] == "0"


def test_a_second_run_has_its_own_ports_and_processes_that_choose_theirs_are_left_out(
    tmp_path: Path,
):
    moved = targets_of(tmp_path, EXPORTER="prometheus", PORT_BASE="9800", HOST="0.0.0.0")
    assert "0.0.0.0:9880" in {each.targets[0] for each in moved}
    chosen = targets_of(tmp_path, EXPORTER="prometheus", PORT="0")
    assert {each.labels["job"] for each in chosen} == {"engine"}


def test_engines_alone_are_there_if_services_push(tmp_path: Path):
    found = {each.targets[0]: each.labels for each in targets_of(tmp_path, EXPORTER="otlp")}
    assert {address: labels["lane"] for address, labels in found.items()} == {
        "127.0.0.1:30000": "0",
        "other:31000": "1",
        "other:31001": "1",
    }
    assert {labels["job"] for labels in found.values()} == {"engine"}


def test_a_run_that_nobody_scrapes_has_no_file(tmp_path: Path):
    path = RunFolder(tmp_path / "runs" / "desk-1").targets_path
    path.parent.parent.mkdir()
    write_targets(path, targets_of(tmp_path, EXPORTER="prometheus"))
    assert len(json.loads(path.read_text())) == 14
    write_targets(path, targets_of(tmp_path, EXPORTER="none"))
    assert not path.exists()
    assert path == tmp_path / "runs" / "scrape_targets" / "desk-1.json"


@pytest.mark.parametrize("has_failed", [False, True])
async def test_of_a_run_that_has_ended_a_target_stays_if_it_failed_until_it_is_deleted(
    run_folder, has_failed
):
    environ = {"FORGEMQ_TELEMETRY_EXPORTER": "prometheus"}
    made, settings = run_folder.configuration(), LauncherSettings()
    setup = RunSetup(folder=run_folder, configuration=made, settings=settings, environ=environ)
    write_targets(run_folder.targets_path, failed_target(environ, run="of an earlier start"))
    processes = RunProcesses(setup, note=lambda _: None)
    processes.has_failed = has_failed
    await processes.stop()
    assert run_folder.targets_path.exists() == has_failed
    if has_failed:
        [target] = json.loads(run_folder.targets_path.read_text())
        assert target["labels"] == {"job": "run", "run": "desk-1", "ended": "failed"}
    run_folder.remove()
    assert not run_folder.targets_path.exists()


def test_a_failed_run_that_nobody_scrapes_leaves_no_target():
    for environ in (
        {},
        {"FORGEMQ_TELEMETRY_EXPORTER": "prometheus", "FORGEMQ_TELEMETRY_PORT": "?"},
    ):
        assert failed_target(environ, run="desk-1") == ()
