"""How a service starts, without a broker; tests/integration/test_shell.py has one."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.examples import minimal
from forgemq_contracts.messages import Output
from forgemq_contracts.run import StartedRun
from forgemq_settings.environment import SettingsError
from forgemq_settings.ports import free_port
from forgemq_settings.user_code import add_code_paths
from forgemq_shell.connection import kafka_connection
from forgemq_shell.records import emit_of
from forgemq_shell.service import EXIT_REFUSED, Context, run_service
from forgemq_shell.started_run import RunNotStartedError, UnreadableRunError, started_run

BROKER = {"FORGEMQ_KAFKA": "127.0.0.1:9092"}


async def never(context: Context) -> None:
    raise AssertionError("main ran although the settings were refused")


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"FORGEMQ_KAFKA": "127.0.0.1:9092"}, "FORGEMQ_RUN"),
        ({"FORGEMQ_RUN": "r"}, "FORGEMQ_KAFKA"),
        ({"FORGEMQ_RUN": "r", "FORGEMQ_KAFKA": "nohost"}, "FORGEMQ_KAFKA"),
        (
            {**BROKER, "FORGEMQ_RUN": "r", "FORGEMQ_KAFKA_SASL_PASSWD": "x"},
            "FORGEMQ_KAFKA_SASL_PASSWD",
        ),
        (
            {**BROKER, "FORGEMQ_RUN": "r", "FORGEMQ_TELEMETRY_EXPORTER": "jaeger"},
            "FORGEMQ_TELEMETRY_EXPORTER",
        ),
        (
            {**BROKER, "FORGEMQ_RUN": "r", "FORGEMQ_SERVICE_STOP_GRACE_S": "0"},
            "FORGEMQ_SERVICE_STOP_GRACE_S",
        ),
    ],
)
def test_refused_settings_are_one_line_that_names_the_variable(
    environ: dict, name: str, capsys: pytest.CaptureFixture[str]
):
    assert run_service("merger", never, environ) == EXIT_REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["service"], event["event"]) == ("merger", "refused")
    assert event["error"].startswith(f"{name}: ")


def test_the_connection_takes_every_security_setting():
    connection = kafka_connection(
        {
            "FORGEMQ_KAFKA": "a:1,b:2",
            "FORGEMQ_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "FORGEMQ_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "FORGEMQ_KAFKA_SASL_USERNAME": "u",
            "FORGEMQ_KAFKA_SASL_PASSWORD": "p",
            "FORGEMQ_KAFKA_TLS_CA_FILE": "/ca.pem",
            "FORGEMQ_KAFKA_RETRY_S": "90",
            "FORGEMQ_KAFKA_SESSION_TIMEOUT_S": "45",
        }
    )
    assert msgspec.structs.asdict(connection) == {
        "bootstrap": "a:1,b:2",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": "u",
        "sasl_password": "p",
        "tls_ca_file": "/ca.pem",
        "retry_s": 90.0,
        "session_timeout_s": 45.0,
    }
    with pytest.raises(SettingsError, match=r"^FORGEMQ_KAFKA_SASL_MECHANISM: "):
        kafka_connection({**BROKER, "FORGEMQ_KAFKA_SASL_MECHANISM": "MD5"})


def test_the_users_folders_come_after_everything_else_and_only_once():
    before = list(sys.path)
    try:
        add_code_paths(("/users/code", "/users/code", before[0]))
        assert sys.path == [*before, "/users/code"]
    finally:
        sys.path[:] = before


@pytest.fixture
async def log() -> AsyncIterator[MemoryLog]:
    log = MemoryLog(run="r-1")
    yield log
    await log.close()


def started(run: str, *, at_ms: int) -> StartedRun:
    return msgspec.structs.replace(minimal(StartedRun), run=run, started_ms=at_ms)


async def put(log: MemoryLog, *records: StartedRun) -> None:
    writer = await log.writer()
    for record in records:
        await writer.write(
            emit_of(Output(topic=topics.STARTED_RUNS.name, partition=0, record=record))
        )


async def test_the_newest_record_of_the_run_holds(log: MemoryLog):
    await log.create_topics({topics.STARTED_RUNS.name: 1})
    runs = [("r-1", 1), ("r-2", 2), ("r-1", 3), ("r-2", 4)]
    await put(log, *(started(run, at_ms=at_ms) for run, at_ms in runs))
    found = await started_run(log, "r-1", timeout_s=5)
    assert (found.run, found.started_ms) == ("r-1", 3)


async def test_a_service_may_start_before_its_topics_and_its_run(log: MemoryLog):
    waiting = asyncio.ensure_future(started_run(log, "r-1", timeout_s=10))
    await asyncio.sleep(0.1)
    await log.create_topics({topics.STARTED_RUNS.name: 1})
    await put(log, started("r-2", at_ms=1))
    await asyncio.sleep(0.1)
    await put(log, started("r-1", at_ms=2))
    assert (await waiting).started_ms == 2


async def test_a_run_that_never_starts_is_named_with_what_the_log_said(log: MemoryLog):
    with pytest.raises(RunNotStartedError, match=r"no record of run 'r-1'.*0.1 s") as gone:
        await started_run(log, "r-1", timeout_s=0.1)
    assert "does not exist" in str(gone.value.__cause__)


async def test_a_newest_record_that_does_not_decode_is_named_with_what_is_wrong(log: MemoryLog):
    """And neither an older one of the run nor one of another run stands in its way."""
    await log.create_topics({topics.STARTED_RUNS.name: 1})
    await put(log, started("r-1", at_ms=1))
    writer = await log.writer()
    await writer.write(Emit(topic=topics.STARTED_RUNS.name, partition=0, key=b"r-1", value=b"\x80"))
    await put(log, started("r-2", at_ms=2))
    with pytest.raises(
        UnreadableRunError,
        match=r"newest record of run 'r-1' \(started-runs-v1, offset 1\).*missing.*`run`",
    ):
        await started_run(log, "r-1", timeout_s=5)
    await put(log, started("r-1", at_ms=3))
    assert (await started_run(log, "r-1", timeout_s=5)).started_ms == 3


async def test_a_service_that_waits_says_what_is_missing_now_and_then(log: MemoryLog):
    """By its own clock: nothing within 5 s, then a line every 30 s, and none after the record."""
    looks = iter([0.0, 0.0, 4.0, 4.0, 6.0, 6.0, 35.0, 35.0, 37.0, 37.0])
    said: asyncio.Queue[str] = asyncio.Queue()
    waiting = asyncio.ensure_future(
        started_run(
            log, "r-1", timeout_s=120, clock_s=lambda: next(looks, 40.0), say=said.put_nowait
        )
    )
    assert "does not exist" in await said.get()
    await log.create_topics({topics.STARTED_RUNS.name: 1})
    assert await said.get() == "the run has no record yet"
    await put(log, started("r-1", at_ms=1))
    assert (await waiting).started_ms == 1
    assert said.empty()


async def test_a_broker_that_never_answers_is_told_from_a_run_that_was_never_started():
    away = f"127.0.0.1:{free_port()}"
    log = KafkaLog(KafkaConnection(bootstrap=away, retry_s=0.3), run="r-1")
    with pytest.raises(RunNotStartedError, match=r"^no broker answered within 0\.5 s, so run"):
        await started_run(log, "r-1", timeout_s=0.5)
    await log.close()


def test_main_files_are_all_a_service_needs_to_start():
    services = Path(__file__).parents[3] / "services"
    for path in services.glob("*/src/forgemq_*/__main__.py"):
        text = path.read_text(encoding="utf-8")
        if "run_service" in text:
            assert f'run_service("{path.parent.name.removeprefix("forgemq_")}"' in text, path
