"""All clients on the real broker while the process of inference or the engine's is killed.

One broker, gateway, inference process and engine serve all of them, one after the other.
"""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.clients.bench import ON_KAFKA, Client, Mode, keepalive_s
from tests.clients.checks import checked
from tests.clients.systems import System, on_kafka
from tests.clients.test_coding_agents import CLAUDE_CODE, CODEX
from tests.clients.test_libraries import CLIENTS
from tests.clients.test_scaffolds import AIDER, CLINE, MINI_SWE_AGENT, OPENCODE, QWEN_CODE
from tests.clients.test_verifiers import VERIFIERS

ALL = (*CLIENTS, CLAUDE_CODE, CODEX, MINI_SWE_AGENT, OPENCODE, QWEN_CODE, CLINE, AIDER, VERIFIERS)

pytestmark = [
    pytest.mark.clients,
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[System]:
    folder = tmp_path_factory.mktemp("clients")
    async with on_kafka(
        folder, bootstrap=kafka_bootstrap, run=new_run_id(), keepalive_s=keepalive_s(ON_KAFKA[0])
    ) as system:
        yield system


@pytest.mark.parametrize("mode", ON_KAFKA)
@pytest.mark.parametrize(
    "client", ALL, ids=lambda client: f"{client.package}-{client.name}-{client.protocol}"
)
async def test_a_client_only_waits_while_what_samples_its_turn_is_killed_and_started_again(
    client: Client, mode: Mode, system: System, tmp_path: Path
) -> None:
    await checked(client, mode, tmp_path, system, is_kept=True)
