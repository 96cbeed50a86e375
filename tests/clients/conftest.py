"""Plays clients, asserts what holds for all of them, and keeps what passed for the table.

FORGEMQ_TEST_CLIENTS_LOG=kafka plays them on the real broker, which the table does not show.
"""

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.clients.bench import Check, Client, Mode, Outcome, keepalive_s, play
from tests.clients.checks import assert_passed
from tests.clients.install import missing
from tests.clients.systems import System, in_memory, on_kafka
from tests.clients.table import Passed, forget, keep

HERE = Path(__file__).parent
LOG = os.environ.get("FORGEMQ_TEST_CLIENTS_LOG", "memory")
# A client's own limit is 120 s, and the gateway needs seconds around it.
_TEST_S_MAX = {"memory": 180, "kafka": 300}

SystemOf = Callable[[Mode], AbstractAsyncContextManager[System]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(_TEST_S_MAX[LOG]))
            if LOG == "kafka":
                item.add_marker(pytest.mark.integration)  # It needs the broker's files.


@pytest.fixture
def system_of(request: pytest.FixtureRequest, tmp_path: Path) -> SystemOf:
    """A gateway for a mode, on the log that the environment names."""
    if LOG == "memory":
        return lambda mode: in_memory(tmp_path, keepalive_s=keepalive_s(mode))
    bootstrap = request.getfixturevalue("kafka_bootstrap")
    run = request.getfixturevalue("new_run_id")()
    return lambda mode: on_kafka(
        tmp_path, bootstrap=bootstrap, run=run, keepalive_s=keepalive_s(mode)
    )


@pytest.fixture
def check(system_of: SystemOf, tmp_path: Path) -> Check:
    """Plays a client in a mode, asserts what holds for all clients, and keeps that it passed."""

    async def run(client: Client, mode: Mode) -> Outcome:
        if LOG == "memory":
            forget(client, mode)
        problem = missing(client.package)
        assert problem == ""
        async with system_of(mode) as system:
            outcome = await play(client, mode, tmp_path, system)
        assert_passed(client, mode, outcome)
        if LOG == "memory":
            keep(Passed.of(client, mode, outcome))
        return outcome

    return run
