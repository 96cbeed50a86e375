"""What every test may use: a log of a fresh run, and the tests that this machine can run."""

import gc
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from tests.docker_engine import HOW_TO, docker_answers

pytest_plugins = ["tests.broker_fixture", "tests.engine_fixture"]

_SKIPPED = pytest.StashKey[dict[str, int]]()


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
    "containers": (docker_answers, HOW_TO),
}


# Property tests draw the same cases every time, so that runs compare; `explore` draws new ones.
# No deadline for an example: a busy machine is no defect, and each test has a timeout of its own.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Count the tests that this machine cannot run."""
    config.stash[_SKIPPED] = {}


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what was skipped."""
    skipped = terminalreporter.config.stash[_SKIPPED]
    if skipped:
        terminalreporter.section("machine")
    for reason, count in skipped.items():
        terminalreporter.write_line(f"skipped {count} tests: {reason}")


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
