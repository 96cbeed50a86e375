"""Which variables of the launcher's environment each service gets."""

import importlib
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_launcher.commands.creation import REQUIRED
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.services import SERVICES, Addresses, service_specs

GIVEN = {
    "PATH": "/bin",
    "FORGEMQ_KAFKA": "elsewhere:9092",
    "FORGEMQ_KAFKA_SASL_PASSWORD": "broker-password",
    "FORGEMQ_TELEMETRY_FOLDER": "/telemetry",
    **{f"FORGEMQ_{name.upper()}_OPTION": name for name in ("launcher", *SERVICES)},
}


def environs(folder: Path) -> dict[str, dict[str, str]]:
    configuration = RunConfiguration(
        run="desk-1",
        seed=0,
        model=Model(path="model"),
        queues=(Queue(domain="desk", task_source="", agent=""),),
        trainer=Trainer(steps=1),
    )
    addresses = Addresses(
        kafka="127.0.0.1:9",
        engine_urls=("http://127.0.0.1:1",),
        host="127.0.0.1",
        gateway_port=2,
        console_port=3,
        admin_key="admin-key",
    )
    specs = service_specs(
        configuration, folder=RunFolder(folder), addresses=addresses, environ=GIVEN
    )
    return {spec.module.removeprefix("forgemq_"): dict(spec.environ) for spec in specs}


def test_a_service_sees_its_own_settings_and_no_others(tmp_path: Path) -> None:
    given = environs(tmp_path)
    assert sorted(given) == sorted(SERVICES)
    for service, environ in given.items():
        options = {name for name in environ if name.endswith("_OPTION")}
        assert options == {f"FORGEMQ_{service.upper()}_OPTION"}
        assert (environ["PATH"], environ["FORGEMQ_RUN"]) == ("/bin", "desk-1")
        assert environ["FORGEMQ_TELEMETRY_FOLDER"] == "/telemetry"


def test_the_admin_key_is_with_the_gateway_and_the_agents_alone(tmp_path: Path) -> None:
    holders = {name for name, env in environs(tmp_path).items() if "admin-key" in env.values()}
    assert holders == {"gateway", "agents"}


def test_agents_get_no_broker_and_the_others_the_runs_own(tmp_path: Path) -> None:
    given = environs(tmp_path)
    agents = given.pop("agents")
    assert not [name for name in agents if name.startswith("FORGEMQ_KAFKA")]
    for environ in given.values():
        assert environ["FORGEMQ_KAFKA"] == "127.0.0.1:9"
        assert environ["FORGEMQ_KAFKA_SASL_PASSWORD"] == "broker-password"


@pytest.mark.parametrize("service", SERVICES)
def test_create_names_each_services_settings_without_a_default(service: str) -> None:
    settings = getattr(
        importlib.import_module(f"forgemq_{service}.settings"), f"{service.title()}Settings"
    )
    required = [f.name.upper() for f in msgspec.structs.fields(settings) if f.required]
    assert [name for name in required if f"_{name}" not in REQUIRED.get(service, "")] == []
    assert bool(required) == (service in REQUIRED)
