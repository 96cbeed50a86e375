"""The broker of a test session: FORGEMQ_KAFKA, testcontainers, or the local broker from wheels."""

import gc
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from forgemq_bus.blobs import BlobStore
from forgemq_bus.broker import LocalBroker
from forgemq_bus.broker.jars import jars_folder
from forgemq_bus.kafka import KafkaConnection, KafkaLog

pytest_plugins = ["tests.engine_fixture"]

KAFKA_IMAGE = "confluentinc/cp-kafka:7.9.0"  # testcontainers needs this vendor's scripts.
_DOCKER_PROBE_S = 2
_SKIPPED = pytest.StashKey[dict[str, int]]()


def broker_kind() -> str:
    """Which broker this session's integration tests run against."""
    if os.environ.get("FORGEMQ_KAFKA"):
        return f"the one at {os.environ['FORGEMQ_KAFKA']} (FORGEMQ_KAFKA)"
    if os.environ.get("FORGEMQ_TEST_BROKER") == "testcontainers":
        return f"{KAFKA_IMAGE} in Docker (FORGEMQ_TEST_BROKER)"
    return "Apache Kafka 4.2.0, started from wheels and jars"


def docker_answers() -> bool:
    """Whether a Docker engine answers; testcontainers brings the client."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=_DOCKER_PROBE_S)
    except DockerException:
        return False
    client.close()
    return True


def cuda_is_there() -> bool:
    """Whether the driver shows a device; does not load torch."""
    return Path("/dev/nvidia0").exists()


def browser_is_there() -> bool:
    """Whether a browser that the tests of the page can drive is on the path."""
    from tests.integration.browser import browser_program

    return browser_program() is not None


CONDITIONS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (cuda_is_there, "no CUDA device"),
    "browser": (browser_is_there, "no Chromium or Chrome"),
}


# Property tests draw the same cases every time, so that runs compare; `explore` draws new ones.
# No deadline for an example: a busy machine is no defect, and each test has a timeout of its own.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Count the tests that this machine cannot run."""
    config.stash[_SKIPPED] = {}


def pytest_report_header(config: pytest.Config) -> str:
    return f"broker of integration tests: {broker_kind()}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave the loaded modules and the tests out of garbage collections.

    They live until the end: 800,000 objects, half a second for each full collection, and 2.7 s
    for all the collections while they are loaded.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip a test that this machine cannot run, and count it."""
    for marker, (is_there, reason) in CONDITIONS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_there():
            config.stash[_SKIPPED][f"{marker}: {reason}"] = len(marked)
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch the jars before the first test, whose timeout they would exceed."""
    is_needed = any(item.get_closest_marker("integration") for item in session.items)
    if is_needed and broker_kind().startswith("Apache") and not session.config.option.collectonly:
        jars_folder(Path.home() / ".cache" / "forgemq", progress=print)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("machine")
    terminalreporter.write_line(f"broker of integration tests: {broker_kind()}")
    skipped = terminalreporter.config.stash[_SKIPPED]
    for reason, count in skipped.items():
        terminalreporter.write_line(f"skipped {count} tests: {reason}")
    if os.environ.get("FORGEMQ_TEST_BROKER") != "testcontainers":
        terminalreporter.write_line("not tried: a broker in Docker (FORGEMQ_TEST_BROKER)")


@pytest.fixture(scope="session")
def kafka_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real broker that runs during the whole session."""
    if os.environ.get("FORGEMQ_KAFKA"):
        yield os.environ["FORGEMQ_KAFKA"]
    elif os.environ.get("FORGEMQ_TEST_BROKER") == "testcontainers":
        yield from _container_bootstrap()
    else:
        broker = LocalBroker(tmp_path_factory.mktemp("kafka"))
        try:
            yield broker.start()
        finally:
            broker.stop()


def _container_bootstrap() -> Iterator[str]:
    from testcontainers.community.kafka import KafkaContainer

    if not docker_answers():
        pytest.fail("FORGEMQ_TEST_BROKER=testcontainers, but no Docker engine answers")
    container = KafkaContainer(KAFKA_IMAGE).with_kraft()
    for name in ("REPLICATION_FACTOR", "MIN_ISR"):
        container.with_env(f"KAFKA_TRANSACTION_STATE_LOG_{name}", "1")
    with container:
        yield container.get_bootstrap_server()


@pytest.fixture(scope="session")
def new_run_id() -> Callable[[], str]:
    """Makes run ids that no earlier test or session used."""
    session, numbers = secrets.token_hex(4), itertools.count()
    return lambda: f"t-{session}-{next(numbers)}"


@pytest.fixture
async def kafka_log(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> AsyncIterator[KafkaLog]:
    """A log of a fresh run on the real broker, with a blob store."""
    run = new_run_id()
    log = KafkaLog(
        KafkaConnection(bootstrap=kafka_bootstrap),
        run=run,
        blobs=BlobStore(str(tmp_path / "blobs"), run=run),
    )
    yield log
    await log.close()
