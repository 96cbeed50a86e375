"""Which variables of the launcher's environment each service gets."""

import importlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_launcher.commands.creation import REQUIRED
from forgemq_launcher.core.outside_agents import outside_agents
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.engine_servers import servers
from forgemq_launcher.upkeep.services import SERVICES, Addresses, has_tls, service_specs
from forgemq_launcher.upkeep.supervisor import ServiceSpec

GIVEN = {
    "PATH": "/bin",
    "FORGEMQ_KAFKA": "elsewhere:9092",
    "FORGEMQ_KAFKA_SASL_PASSWORD": "broker-password",
    "FORGEMQ_TELEMETRY_FOLDER": "/telemetry",
    **{f"FORGEMQ_{name.upper()}_OPTION": name for name in ("launcher", *SERVICES)},
}


PLAYED = Queue(domain="desk", task_source="desk:task", agent="desk:play")
ADDRESSES = Addresses(
    kafka="127.0.0.1:9",
    engine_urls=("http://127.0.0.1:1",),
    host="127.0.0.1",
    gateway_port=2,
    gateway_fd=7,
    console_port=3,
    console_fd=8,
    admin_key="admin-key",
)
OUTSIDE = Queue(domain="outside", task_source="", agent="")


def configuration(*queues: Queue) -> RunConfiguration:
    return RunConfiguration(
        run="desk-1", seed=0, model=Model(path="model"), queues=queues, trainer=Trainer(steps=1)
    )


def made(folder: Path, *queues: Queue, gateways: int = 1) -> Sequence[ServiceSpec]:
    return service_specs(
        configuration(*queues),
        folder=RunFolder(folder),
        addresses=ADDRESSES,
        environ=GIVEN,
        gateways=gateways,
    )


def specs(folder: Path, *queues: Queue) -> dict[str, ServiceSpec]:
    return {spec.module.removeprefix("forgemq_"): spec for spec in made(folder, *queues)}


def environs(folder: Path) -> dict[str, dict[str, str]]:
    return {name: dict(spec.environ) for name, spec in specs(folder, PLAYED).items()}


def test_a_service_sees_its_own_settings_and_no_others(tmp_path: Path) -> None:
    given = environs(tmp_path)
    assert sorted(given) == sorted(SERVICES)
    for service, environ in given.items():
        options = {name for name in environ if name.endswith("_OPTION")}
        assert options == {f"FORGEMQ_{service.upper()}_OPTION"}
        assert (environ["PATH"], environ["FORGEMQ_RUN"]) == ("/bin", "desk-1")
        assert environ["FORGEMQ_TELEMETRY_FOLDER"] == "/telemetry"


def test_processes_of_one_service_are_numbered_so_that_their_metrics_have_ports(
    tmp_path: Path,
) -> None:
    numbers = {
        spec.name: spec.environ["FORGEMQ_TELEMETRY_NUMBER"]
        for spec in service_specs(
            configuration(PLAYED),
            folder=RunFolder(tmp_path),
            addresses=msgspec.structs.replace(ADDRESSES, engine_urls=("http://a", "http://b")),
            environ=GIVEN,
            gateways=2,
        )
    }
    assert numbers.pop("gateway-1") == numbers.pop("inference-1") == "1"
    assert set(numbers.values()) == {"0"}


def test_each_service_but_the_agents_touches_a_file_of_its_own(tmp_path: Path) -> None:
    made = specs(tmp_path, PLAYED)
    files = {name: each.environ.get("FORGEMQ_SERVICE_ALIVE_FILE") for name, each in made.items()}
    assert files["trainer"] == str(RunFolder(tmp_path) / "logs" / "trainer.alive")
    assert files["agents"] is None
    watched = {name: str(each.alive_path) for name, each in made.items() if each.alive_path}
    assert watched == {name: file for name, file in files.items() if file}
    assert len(set(watched.values())) == len(made) - 1


def test_several_gateways_share_a_socket_and_each_has_a_port_of_its_own(tmp_path: Path) -> None:
    gateways = [
        spec for spec in made(tmp_path, PLAYED, gateways=2) if spec.module == "forgemq_gateway"
    ]
    assert [spec.name for spec in gateways] == ["gateway-0", "gateway-1"]
    assert [spec.inherited_fds for spec in gateways] == [(7,), (7,)]
    assert {spec.environ["FORGEMQ_GATEWAY_PEER_PORT"] for spec in gateways} == {"0"}
    alone = specs(tmp_path, PLAYED)["gateway"]
    assert (alone.name, "FORGEMQ_GATEWAY_PEER_PORT" in alone.environ) == ("gateway", False)


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


def test_agents_are_started_for_queues_that_have_one(tmp_path: Path) -> None:
    started = {queues: set(specs(tmp_path, *queues)) for queues in ((PLAYED, OUTSIDE), (OUTSIDE,))}
    assert started[(PLAYED, OUTSIDE)] == set(SERVICES)
    assert started[(OUTSIDE,)] == set(SERVICES) - {"agents"}


def test_a_model_is_judged_without_a_trainer_and_its_agents_know_how_often(
    tmp_path: Path,
) -> None:
    judging = service_specs(
        configuration(PLAYED),
        folder=RunFolder(tmp_path),
        addresses=ADDRESSES,
        environ=GIVEN,
        samples=5,
    )
    started = {spec.module.removeprefix("forgemq_"): spec.environ for spec in judging}
    assert set(started) == set(SERVICES) - {"trainer"}
    assert started["agents"]["FORGEMQ_AGENTS_SAMPLES"] == "5"
    assert "FORGEMQ_AGENTS_SAMPLES" not in specs(tmp_path, PLAYED)["agents"].environ


def test_gateway_and_console_get_the_sockets_that_the_launcher_holds(tmp_path: Path) -> None:
    made = specs(tmp_path, PLAYED)
    assert {name: spec.inherited_fds for name, spec in made.items() if spec.inherited_fds} == {
        "gateway": (7,),
        "console": (8,),
    }
    assert made["console"].environ["FORGEMQ_CONSOLE_LISTENER_FD"] == "8"
    assert made["gateway"].environ["FORGEMQ_GATEWAY_LISTENER_FD"] == "7"


def test_the_commands_for_outside_agents_name_their_domain_address_and_key() -> None:
    text = outside_agents(
        configuration(PLAYED, OUTSIDE), gateway_url="http://here:1", admin_key="$(cat admin.key)"
    )
    assert text.startswith("groups of outside are asked for over HTTP (docs/your_agent.md):")
    assert "export GATEWAY=http://here:1 ADMIN_KEY=$(cat admin.key)" in text
    assert '"domain": "outside"' in text
    none = configuration(PLAYED)
    assert outside_agents(none, gateway_url="http://here:1", admin_key="k") == ""


@pytest.mark.parametrize("service", SERVICES)
def test_create_names_each_services_settings_without_a_default(service: str) -> None:
    settings = getattr(
        importlib.import_module(f"forgemq_{service}.settings"), f"{service.title()}Settings"
    )
    required = [f.name.upper() for f in msgspec.structs.fields(settings) if f.required]
    assert [name for name in required if f"_{name}" not in REQUIRED.get(service, "")] == []
    assert not required or service in REQUIRED


def test_a_certificate_and_a_public_name_make_the_addresses_that_agents_and_people_get(
    tmp_path: Path,
) -> None:
    addresses = msgspec.structs.replace(
        ADDRESSES, public_host="trainer.example", has_gateway_tls=True, has_console_tls=True
    )
    assert addresses.gateway_url == "https://trainer.example:2"
    assert addresses.console_url == "https://trainer.example:3"
    made = {
        spec.module.removeprefix("forgemq_"): spec.environ
        for spec in service_specs(
            configuration(PLAYED), folder=RunFolder(tmp_path), addresses=addresses, environ=GIVEN
        )
    }
    assert made["agents"]["FORGEMQ_AGENTS_GATEWAY_URL"] == "https://trainer.example:2"
    assert made["gateway"]["FORGEMQ_GATEWAY_PUBLIC_URL"] == "https://trainer.example:2"
    assert made["reward"]["GATEWAY_URL"] == "https://trainer.example:2"
    assert ADDRESSES.gateway_url == "http://127.0.0.1:2"
    assert "FORGEMQ_GATEWAY_PUBLIC_URL" not in specs(tmp_path, PLAYED)["gateway"].environ


def test_a_service_has_tls_if_its_own_setting_names_a_certificate() -> None:
    given = {"FORGEMQ_GATEWAY_TLS_CERTIFICATE_FILE": "server.pem"}
    assert has_tls(given, "gateway")
    assert not has_tls(given, "console")


def test_agents_and_engines_get_no_credentials_of_broker_or_blob_store(tmp_path: Path) -> None:
    given = {**GIVEN, "AWS_SECRET_ACCESS_KEY": "blob-password", "MY_KEY": "of the user"}
    made = {
        spec.module.removeprefix("forgemq_"): spec.environ
        for spec in service_specs(
            configuration(PLAYED), folder=RunFolder(tmp_path), addresses=ADDRESSES, environ=given
        )
    }
    holders = {name for name, environ in made.items() if "blob-password" in environ.values()}
    assert holders == set(SERVICES) - {"agents"}
    assert made["agents"]["MY_KEY"] == "of the user"
    (lane,) = servers(
        configuration(PLAYED),
        folder=tmp_path,
        environ={**given, "CUDA_VISIBLE_DEVICES": "-1"},
        addresses=[("127.0.0.1", 1)],
    )
    assert lane.serving._inherited == {
        "PATH": "/bin",
        "MY_KEY": "of the user",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
