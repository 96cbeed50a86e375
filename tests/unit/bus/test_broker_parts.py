"""The local broker without starting one."""

import socket
from pathlib import Path

import pytest

from forgemq_bus.broker.jars import KAFKA_VERSION, JarsError, jars_folder, lock_digest, locked_jars
from forgemq_bus.broker.local import BrokerError, cluster_id, folder_ports


def test_all_kafka_jars_of_the_lock_have_one_version() -> None:
    jars = locked_jars()
    versions = {
        name.removesuffix(".jar").rpartition("-")[2] for name in jars if name.startswith("kafka")
    }
    assert versions == {KAFKA_VERSION}
    assert len(jars) == 46
    assert {"kafka_2.13-4.2.0.jar", "kafka-clients-4.2.0.jar"} < jars.keys()
    assert all(len(sha256) == 64 for sha256 in jars.values())


def test_a_cluster_id_never_reads_as_an_option_and_differs_by_folder() -> None:
    ids = {cluster_id(Path(f"/runs/{number}/kafka")) for number in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {22}
    assert {each[0] for each in ids} == set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef")


def test_a_cache_with_a_jar_missing_says_which(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = tmp_path / f"kafka-{KAFKA_VERSION}-{lock_digest()}"
    folder.mkdir()
    for name in sorted(locked_jars())[1:]:
        (folder / name).touch()
    with pytest.raises(JarsError, match=sorted(locked_jars())[0]):
        jars_folder(tmp_path, progress=lines.append)
    assert lines == []


def test_a_folder_keeps_its_ports(tmp_path: Path) -> None:
    file = tmp_path / "ports.json"
    ports = folder_ports(file)
    assert ports[0] != ports[1]
    assert folder_ports(file) == ports


@pytest.mark.slow
def test_a_port_of_the_folder_that_another_process_took_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ports.json"
    broker_port, _ = folder_ports(file)
    with socket.socket() as other:
        other.bind(("127.0.0.1", broker_port))
        other.listen()
        with pytest.raises(BrokerError, match=f"port {broker_port} .* is in use"):
            folder_ports(file)
