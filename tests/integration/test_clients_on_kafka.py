"""The SDKs of OpenAI and Anthropic on the real broker, gateway, inference process and supervisor.

`make test-clients` has all other clients and modes, with the log in memory or on the broker.
"""

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.clients.bench import ON_KAFKA, Client, Mode, keepalive_s, play
from tests.clients.checks import assert_passed
from tests.clients.systems import System, on_kafka
from tests.clients.test_libraries import ANTHROPIC, OPENAI

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

CLIENTS = [client for client in (*OPENAI, *ANTHROPIC) if client.package == "sdk_python"]
STREAMS = [client for client in CLIENTS if client.asks_again and client.protocol != "responses"]
WHOLE = CLIENTS[0]
CASES: list[tuple[Client, Mode]] = [
    *((client, "parallel") for client in CLIENTS),
    *((client, mode) for client in STREAMS for mode in ("killed", "killed_late")),
    *((client, mode) for client in (WHOLE, *STREAMS) for mode in ON_KAFKA),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[System]:
    """One for all cases; its keep-alives leave time to kill the gateway before the first one."""
    folder = tmp_path_factory.mktemp("clients")
    async with on_kafka(
        folder, bootstrap=kafka_bootstrap, run=new_run_id(), keepalive_s=keepalive_s("killed")
    ) as system:
        yield system


def identity(value: Client | Mode) -> str:
    return value if isinstance(value, str) else f"{value.name}-{value.protocol}"


@pytest.mark.parametrize(("client", "mode"), CASES, ids=identity)
async def test_an_sdk_does_its_task_on_one_exact_path_of_the_real_log(
    client: Client, mode: Mode, system: System, tmp_path: Path
) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "venv").symlink_to(sys.prefix)  # The project's own environment has both SDKs.
    outcome = await play(client, mode, tmp_path, system, installed=installed)
    assert_passed(client, mode, outcome)
