"""Plays clients, asserts what holds for all of them, and keeps what passed for the table.

FORGEMQ_TEST_CLIENTS_LOG=kafka plays all of them on the real broker; the table does not show
these.
"""

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.clients.bench import Check, Client, Mode, Outcome, keepalive_s
from tests.clients.checks import checked
from tests.clients.systems import System, in_memory, on_kafka

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
        async with system_of(mode) as system:
            return await checked(client, mode, tmp_path, system, is_kept=LOG == "memory")

    return run
