"""The broker of a test session: one that is named, one in Docker, or the local one from wheels."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from msgspec import Struct

from forgemq_bus.broker import LocalBroker
from forgemq_bus.broker.jars import jars_folder

KAFKA_IMAGE = "confluentinc/cp-kafka:7.9.0"  # testcontainers needs this vendor's scripts.
START_S_MAX = 180
"""Of a broker in Docker: 30 s, the default of testcontainers, is too short on a busy machine."""

_IMAGE_S_MAX = 600
"""A pull of an image of 400 MB."""

_SAID = pytest.StashKey[bool]()


class Choice(Struct, frozen=True, kw_only=True):
    """Which broker, and why not one in Docker."""

    kind: Literal["named", "docker", "wheels"]
    text: str
    not_docker: str = ""


@functools.cache
def chosen_broker() -> Choice:
    """Which broker this session's integration tests run against; pulls its image.

    Raises:
        pytest.UsageError: FORGEMQ_TEST_BROKER has another value, or asks for what is not there.
    """
    address, asked = os.environ.get("FORGEMQ_KAFKA"), os.environ.get("FORGEMQ_TEST_BROKER", "")
    if asked not in ("", "testcontainers", "wheels"):
        raise pytest.UsageError(f"FORGEMQ_TEST_BROKER is testcontainers or wheels, not {asked!r}")
    if address:
        return Choice(
            kind="named", text=f"the one at {address} (FORGEMQ_KAFKA)", not_docker="FORGEMQ_KAFKA"
        )
    lacking = "FORGEMQ_TEST_BROKER" if asked == "wheels" else _lacking_for_docker()
    if not lacking:
        return Choice(kind="docker", text=f"{KAFKA_IMAGE} in Docker")
    if asked == "testcontainers":
        raise pytest.UsageError(f"FORGEMQ_TEST_BROKER=testcontainers, but {lacking}")
    text = "Apache Kafka 4.2.0, started from wheels and jars"
    return Choice(kind="wheels", text=text, not_docker=lacking)


def _lacking_for_docker() -> str:
    """What a broker in Docker lacks here; "" if nothing."""
    import docker

    from tests.docker_engine import HOW_TO, docker_answers, is_at_hand

    if not docker_answers():
        return HOW_TO
    client = docker.from_env(timeout=_IMAGE_S_MAX)
    try:
        return "" if is_at_hand(KAFKA_IMAGE, client) else f"{KAFKA_IMAGE} cannot be pulled"
    finally:
        client.close()


def pytest_configure(config: pytest.Config) -> None:
    """Say nothing of a broker unless a test needs one."""
    config.stash[_SAID] = False


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch what a broker needs before the first test, whose timeout it would exceed."""
    is_needed = any(item.get_closest_marker("integration") for item in session.items)
    if not is_needed or session.config.option.collectonly:
        return
    session.config.stash[_SAID] = True
    if chosen_broker().kind == "wheels":
        jars_folder(Path.home() / ".cache" / "forgemq", progress=print)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which broker it was."""
    if not terminalreporter.config.stash[_SAID]:
        return
    choice = chosen_broker()
    terminalreporter.section("broker")
    terminalreporter.write_line(f"broker of integration tests: {choice.text}")
    if choice.kind != "docker":
        terminalreporter.write_line(f"not tried: a broker in Docker: {choice.not_docker}")


@pytest.fixture(scope="session")
def kafka_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real broker that runs during the whole session."""
    choice = chosen_broker()
    if choice.kind == "named":
        yield os.environ["FORGEMQ_KAFKA"]
    elif choice.kind == "docker":
        yield from _docker_bootstrap()
    else:
        broker = LocalBroker(tmp_path_factory.mktemp("kafka"))
        try:
            yield broker.start()
        finally:
            broker.stop()


def _docker_bootstrap() -> Iterator[str]:
    import docker
    from testcontainers.community.kafka import KafkaContainer
    from testcontainers.core.config import testcontainers_config

    from tests.docker_engine import is_at_hand

    client = docker.from_env(timeout=_IMAGE_S_MAX)
    # Ryuk removes the broker if this process is killed; without it that is left to a person.
    if not is_at_hand(testcontainers_config.ryuk_image, client):
        testcontainers_config.ryuk_disabled = True
    client.close()
    container = KafkaContainer(KAFKA_IMAGE).with_kraft()
    # A client that asks for a topic before it exists would make one of its own.
    container.with_env("KAFKA_AUTO_CREATE_TOPICS_ENABLE", "false")
    for name in ("REPLICATION_FACTOR", "MIN_ISR"):
        container.with_env(f"KAFKA_TRANSACTION_STATE_LOG_{name}", "1")
    try:
        container.start(timeout=START_S_MAX)
        yield container.get_bootstrap_server()
    finally:
        container.stop()
