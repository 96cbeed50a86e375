"""Services run as the Kafka users of the production overlay; the broker enforces their rights."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import yaml
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from forgemq_bus.broker import LocalBroker
from forgemq_bus.broker.local import folder_ports
from forgemq_bus.kafka import KafkaLog
from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_settings.ports import free_port
from forgemq_shell.connection import kafka_connection
from forgemq_shell.records import emit_of
from tests.integration.kafka_rights import bindings, rights_of
from tests.unit.merger.records import finished, scored

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
RUN, PASSWORD = "users", "a-password"
SERVICES = {
    "scheduler": "assigned",
    "merger": "assigned",
    "reward": "grading_assigned",
    "auditor": "active",
    "gateway": "serving",
    "console": "listening",
}
"""By service, the event that it writes once it has read what it needs; neither GPU nor engine."""
START_S = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Addresses for users, who have their rights, and for the test, which may do everything."""
    folder = tmp_path_factory.mktemp("users")
    plain, controller = folder_ports(folder / "ports.json")
    port = free_port()
    logins = " ".join(f'user_{name}="{PASSWORD}"' for name in rights_of(RUN))
    options = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{port},"
        f"CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
        "SASL_PLAINTEXT:SASL_PLAINTEXT",
        "listener.name.sasl_plaintext.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": "org.apache.kafka.common.security."
        f"plain.PlainLoginModule required {logins};",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    local = LocalBroker(folder, options=options)
    try:
        address = local.start()
        admin = AdminClient({"bootstrap.servers": address})
        for future in admin.create_acls(bindings(RUN)).values():
            future.result(timeout=60)
        yield f"127.0.0.1:{port}", address
    finally:
        local.stop()


def environ(address: str, workload: str, folder: Path, **others: str) -> dict[str, str]:
    return {
        **os.environ,
        "FORGEMQ_RUN": RUN,
        "FORGEMQ_KAFKA": address,
        "FORGEMQ_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "FORGEMQ_KAFKA_SASL_MECHANISM": "PLAIN",
        "FORGEMQ_KAFKA_SASL_USERNAME": f"forgemq-{workload}",
        "FORGEMQ_KAFKA_SASL_PASSWORD": PASSWORD,
        "FORGEMQ_BLOBS": (folder / "blobs").as_uri(),
        "FORGEMQ_GATEWAY_ADMIN_KEY": "0123456789abcdef0123456789abcdef",
        "FORGEMQ_GATEWAY_PORT": str(free_port()),
        "FORGEMQ_CONSOLE_PORT": str(free_port()),
        **others,
    }


async def start(module: str, *arguments: str, given: dict[str, str]) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, env=given, stderr=PIPE, stdout=PIPE, cwd=ROOT
    )


async def end(process: Process) -> None:
    """Kill it, if it lives, and close its pipes."""
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def wait_for(process: Process, event: str, *, service: str) -> None:
    """Read the process's lines up to this event."""
    seen: list[str] = []

    async def read() -> bool:
        while line := await process.stderr.readline():
            seen.append(line.decode())
            if f'"event":"{event}"' in seen[-1]:
                return True
        return False

    try:
        is_there = await asyncio.wait_for(read(), START_S)
    except TimeoutError:
        is_there = False
    assert is_there, f"{service} did not write {event}: {''.join(seen)[-3000:]}"


async def test_each_service_starts_and_the_merger_merges_with_the_rights_of_its_own_user(
    broker: tuple[str, str], tmp_path: Path
):
    address, plain = broker
    given = environ(address, "run", tmp_path)
    # Trained by nothing here: the records of a run that others would write are the test's.
    for changes in ((), ("log.lanes_max=2",)):
        arguments = ("create", "deploy/demo/run.toml", *changes)
        creating = await start("forgemq_launcher", *arguments, given=given)
        out, errors = await creating.communicate()
        assert creating.returncode == 0, (out + errors).decode()[-3000:]
    async with AsyncExitStack() as stack:
        for service, event in SERVICES.items():
            process = await start(f"forgemq_{service}", given=environ(address, service, tmp_path))
            stack.push_async_callback(end, process)
            await wait_for(process, event, service=service)
        log = KafkaLog(kafka_connection({"FORGEMQ_KAFKA": plain}), run=RUN)
        stack.push_async_callback(log.close)
        await write_group(log)
        async with asyncio.timeout(60):
            reader = await log.reader({Place(topics.MERGED_TREES.name, 0): 0})
            while not await reader.read(timeout_s=1.0, records_max=1):
                pass


async def write_group(log: KafkaLog) -> None:
    """What inference and reward write about a group."""
    writer = await log.writer()

    async def write(topic: topics.Topic, record: msgspec.Struct) -> int:
        return await writer.write(emit_of(Output(topic=topic.name, partition=0, record=record)))

    offset = await write(topics.FINISHED_COMPLETIONS, finished(8, None, 0, [1], [2]))
    group = scored(8, offsets={8: offset}, domain="shop_desk")
    await write(topics.SCORED_GROUPS, group)


def test_a_user_is_refused_what_its_service_does_not_write(broker: tuple[str, str]):
    admin = AdminClient({"bootstrap.servers": broker[1]})
    names = [f"{RUN}.{topic.name}" for topic in (topics.MERGED_GROUPS, topics.SCHEDULED_STEPS)]
    made = [NewTopic(name, count, 1) for name, count in zip(names, (2, 1), strict=True)]
    for future in admin.create_topics(made).values():
        with contextlib.suppress(KafkaException):  # The run of another test has made it.
            future.result(timeout=60)
    producer = Producer(
        {
            "bootstrap.servers": broker[0],
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "forgemq-merger",
            "sasl.password": PASSWORD,
        }
    )
    found: dict[str, int] = {}
    for name in names:
        producer.produce(
            name, b"v", on_delivery=lambda error, _, name=name: found.update({name: code(error)})
        )
    assert producer.flush(60) == 0
    assert found == {names[0]: 0, names[1]: KafkaError.TOPIC_AUTHORIZATION_FAILED}


def code(error: KafkaError | None) -> int:
    return error.code() if error else 0


def test_the_overlays_file_has_the_same_rules_for_its_own_run():
    path = ROOT / "deploy/kubernetes/overlays/production/kafka-users.yaml"
    found = {
        each["metadata"]["name"]: each["spec"]["authorization"]["acls"]
        for each in yaml.safe_load_all(path.read_text())
    }
    text = yaml.safe_dump(rights_of(RUN)).replace(RUN + ".", "production.")
    assert yaml.safe_load(text) == found
