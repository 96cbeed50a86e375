"""A broker that requires TLS and a user: SASL_SSL with a test authority, PLAIN and SCRAM."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from forgemq_bus.blobs import BlobStore
from forgemq_bus.broker import LocalBroker
from forgemq_bus.broker.local import folder_ports
from forgemq_bus.errors import AccessError, LogUnavailableError
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Emit, Place
from forgemq_launcher.records.run_topics import create_topics, write_start
from forgemq_settings.ports import free_port
from forgemq_shell.connection import kafka_connection
from tests.certificates import authority
from tests.integration.test_console import state_when, write
from tests.unit.run_view.synthetic import SyntheticRun, started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

USER, PASSWORD = "forgemq", "a pass,word=with signs"
IN, OUT = Place("in", 0), Place("out", 0)


@dataclass(frozen=True, kw_only=True)
class SecureBroker:
    """One broker with two listeners: SASL_SSL for clients, PLAINTEXT for itself."""

    address: str
    plain_address: str
    ca_file: Path
    other_ca_file: Path

    def environ(self, **changed: str) -> dict[str, str]:
        """Environment of a service that connects to this broker."""
        return {
            "FORGEMQ_KAFKA": self.address,
            "FORGEMQ_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "FORGEMQ_KAFKA_SASL_MECHANISM": "SCRAM-SHA-256",
            "FORGEMQ_KAFKA_SASL_USERNAME": USER,
            "FORGEMQ_KAFKA_SASL_PASSWORD": PASSWORD,
            "FORGEMQ_KAFKA_TLS_CA_FILE": str(self.ca_file),
            **{f"FORGEMQ_KAFKA_{name}": value for name, value in changed.items()},
        }

    def connection(self, **changed: str) -> KafkaConnection:
        """The connection that a service makes from that environment."""
        return kafka_connection(self.environ(**changed))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    folder = tmp_path_factory.mktemp("secure")
    ca = authority()
    keystore = folder / "broker.pem"
    keystore.write_bytes(b"".join(ca.server()))
    files = ca.write(folder / "ca.pem"), authority("another").write(folder / "other.pem")
    plain_port, controller_port = folder_ports(folder / "ports.json")
    port = free_port()
    local = LocalBroker(
        folder, options=secure_options(port, plain_port, controller_port, keystore=keystore)
    )
    try:
        plain_address = local.start()
        create_scram_user(plain_address)
        yield SecureBroker(
            address=f"127.0.0.1:{port}",
            plain_address=plain_address,
            ca_file=files[0],
            other_ca_file=files[1],
        )
    finally:
        local.stop()


@pytest.fixture(autouse=True)
async def connections_end(broker: SecureBroker) -> AsyncIterator[None]:
    """Fail a test that leaves a connection to the broker open.

    Closing over TLS waits for the other side's close message, so a connection that was refused in
    the last line of a test may stay open for a moment after its log has closed.
    """
    yield
    async with asyncio.timeout(30):
        while connected(broker.address) or connected(broker.plain_address):  # noqa: ASYNC110 - a socket has no event
            await asyncio.sleep(0.01)


def connected(address: str) -> bool:
    """Whether this process has a connection to an address."""
    host, _, port = address.rpartition(":")
    found = psutil.Process().net_connections(kind="tcp")
    return any(connection.raddr == (host, int(port)) for connection in found)


def secure_options(
    port: int, plain_port: int, controller_port: int, *, keystore: Path
) -> dict[str, str]:
    own = "listener.name.sasl_ssl"
    login = "org.apache.kafka.common.security"
    return {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain_port},SASL_SSL://127.0.0.1:{port},"
        f"CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain_port},SASL_SSL://127.0.0.1:{port}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
        "SASL_SSL:SASL_SSL",
        f"{own}.ssl.keystore.type": "PEM",
        f"{own}.ssl.keystore.location": str(keystore),
        f"{own}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        f"{own}.plain.sasl.jaas.config": f"{login}.plain.PlainLoginModule required "
        f'user_{USER}="{PASSWORD}";',
        f"{own}.scram-sha-256.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
    }


def create_scram_user(address: str) -> None:
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    user = UserScramCredentialUpsertion(USER, info, PASSWORD.encode())
    admin = AdminClient({"bootstrap.servers": address})
    for future in admin.alter_user_scram_credentials([user]).values():
        future.result(timeout=30)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
async def test_everything_of_the_log_works_over_tls_with_a_user(
    broker: SecureBroker, mechanism: str
) -> None:
    log = KafkaLog(broker.connection(SASL_MECHANISM=mechanism), run=f"r-{mechanism.lower()}")
    try:
        await log.create_topics({"in": 1, "out": 1})
        inputs = [Emit(topic="in", partition=0, key=b"k", value=b"%d" % n) for n in range(3)]
        assert await (await log.writer()).write_all(inputs) == [0, 1, 2]

        assigned: list[frozenset[int]] = []

        async def on_assigned(numbers: frozenset[int]) -> None:
            assigned.append(numbers)

        async def on_revoked(numbers: frozenset[int]) -> None:
            assigned.remove(numbers)

        member = await log.member(
            group="g", topics=["in"], on_assigned=on_assigned, on_revoked=on_revoked
        )
        assert assigned == [frozenset({0})]
        read = []
        async with asyncio.timeout(30):
            while len(read) < 3:
                read += await member.read(timeout_s=1.0, records_max=10)
        assert [record.value for record in read] == [b"0", b"1", b"2"]

        transactions = await log.transaction_writer("t")
        outputs = [Emit(topic="out", partition=0, key=b"k", value=r.value * 2) for r in read]
        await transactions.commit(outputs=outputs, group="g", positions={IN: 3})
        assert await log.committed(group="g", places=[IN]) == {IN: 3}

        reader = await log.reader({OUT: 0}, isolation="committed")
        found = []
        async with asyncio.timeout(30):
            while len(found) < 3:
                found += await reader.read(timeout_s=1.0, records_max=10)
        assert [record.value for record in found] == [b"00", b"11", b"22"]
        await log.trim({IN: 2})
        assert await log.first_positions([IN]) == {IN: 2}
        await member.close()
        assert assigned == []
    finally:
        await log.close()


async def test_the_console_follows_a_run_over_tls_with_a_user(
    broker: SecureBroker, tmp_path: Path
) -> None:
    """The live view reads with faust, which makes its own clients."""
    begin = msgspec.structs.replace(started(run="seen"), blobs=str(tmp_path / "blobs"))
    port = free_port()
    log = KafkaLog(broker.connection(), run="seen", blobs=BlobStore(begin.blobs, run="seen"))
    environ = {
        **os.environ,
        **broker.environ(),
        "FORGEMQ_RUN": "seen",
        "FORGEMQ_CONSOLE_PORT": str(port),
    }
    try:
        await create_topics(log, begin.configuration)
        await write_start(broker.connection(), begin)
        await write(log, SyntheticRun().play(steps=1), first=0)
        console = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "forgemq_console"), env=environ, cwd=tmp_path
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                state = await state_when(http, lambda state: state["steps_trained"] == 1)
            assert state["run"] == "seen"
            console.terminate()
            assert await console.wait() == 0
        finally:
            if console.returncode is None:
                console.kill()
                await console.wait()
    finally:
        await log.close()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"SASL_PASSWORD": "wrong"},
            r"refuses user 'forgemq': check FORGEMQ_KAFKA_SASL_USERNAME and .*_SASL_PASSWORD$",
        ),
        (
            {"SASL_MECHANISM": "PLAIN", "SASL_PASSWORD": "wrong"},
            r"refuses user 'forgemq': check FORGEMQ_KAFKA_SASL_USERNAME and .*_SASL_PASSWORD$",
        ),
        (
            {"SASL_MECHANISM": "SCRAM-SHA-512"},
            r"check FORGEMQ_KAFKA_SASL_MECHANISM \(SCRAM-SHA-512\)$",
        ),
        ({"TLS_CA_FILE": ""}, r"not trusted: .* check FORGEMQ_KAFKA_TLS_CA_FILE \(empty"),
        ({"TLS_CA_FILE": "{other}"}, r"not trusted: .* check FORGEMQ_KAFKA_TLS_CA_FILE \(/.*pem\)"),
        ({"TLS_CA_FILE": "/no/such.pem"}, r"FORGEMQ_KAFKA_TLS_CA_FILE: no certificates in /no"),
    ],
)
async def test_what_the_broker_or_its_client_refuses_is_said_at_once_naming_the_setting(
    broker: SecureBroker, changed: dict[str, str], said: str
) -> None:
    named = {name: value.format(other=broker.other_ca_file) for name, value in changed.items()}
    log = KafkaLog(broker.connection(**named), run="r")
    try:
        async with asyncio.timeout(10):  # the log keeps trying for 30 s if no broker answers
            with pytest.raises(AccessError, match=said) as raised:
                await log.create_topics({"a": 1})
    finally:
        await log.close()
    assert "\n" not in str(raised.value)
    assert "wrong" not in str(raised.value)


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_SSL"])
async def test_a_door_of_another_protocol_is_unavailable_with_a_hint(
    broker: SecureBroker, protocol: str
) -> None:
    address = broker.plain_address if protocol == "SASL_SSL" else broker.address
    environ = broker.environ(SECURITY_PROTOCOL=protocol) | {"FORGEMQ_KAFKA": address}
    connection = msgspec.structs.replace(kafka_connection(environ), retry_s=3.0)
    log = KafkaLog(connection, run="r")
    said = rf"{address} did not answer within 3 s.*FORGEMQ_KAFKA_SECURITY_PROTOCOL \({protocol}\)"
    with pytest.raises(LogUnavailableError, match=said) as raised:
        await log.create_topics({"a": 1})
    assert "\n" not in str(raised.value)
    await log.close()


def test_a_service_with_a_wrong_password_ends_at_once_with_one_line(broker: SecureBroker) -> None:
    environ = {**os.environ, **broker.environ(SASL_PASSWORD="wrong"), "FORGEMQ_RUN": "r"}
    done = subprocess.run(
        [sys.executable, "-m", "forgemq_merger"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (refused,) = [line for line in done.stderr.splitlines() if '"refused"' in line]
    assert re.search("check FORGEMQ_KAFKA_SASL_USERNAME and FORGEMQ_KAFKA_SASL_PASSWORD", refused)
    assert "wrong" not in done.stderr
