"""An agent whose code blocks the event loop of all agents, against a gateway in a thread."""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from forgemq_agents.app import play_run
from forgemq_agents.settings import AgentsSettings
from forgemq_agents.user_code import DomainCode
from forgemq_contracts.admin import FinishRequest, Lease
from forgemq_contracts.run import Evaluation
from forgemq_telemetry.telemetry import Telemetry
from tests.memory_gateway import MemoryGateway
from tests.memory_gateway_http import served
from tests.unit.agents.agent_run import configuration, numbered
from tests.unit.agents.conftest import WholeRun

pytestmark = [pytest.mark.slow, pytest.mark.wall_clock, pytest.mark.timeout(180)]

LEASE_S = 3.0
BLOCKED_S = 60.0


class TimedGateway(MemoryGateway):
    """Notes when each heartbeat came."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.heard_s: dict[str, list[float]] = {}

    async def renew_lease(self, episode_id: str) -> Lease:
        self.heard_s.setdefault(episode_id, []).append(time.monotonic())
        return await super().renew_lease(episode_id)


class GatewayThread:
    """A gateway on another thread's loop, as if it were another process."""

    def __init__(self) -> None:
        self.gateway: TimedGateway | None = None
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))
        self._stop = asyncio.Event()

    def start(self) -> TimedGateway:
        self._thread.start()
        assert self._ready.wait(20)
        assert self.gateway is not None
        return self.gateway

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        scheduler = WholeRun(slots=1, groups_to_train=1, steps=4)
        self.gateway = TimedGateway(
            domain="count", group_size=2, lease_s=LEASE_S, scheduler=scheduler
        )
        async with served(self.gateway):
            self._ready.set()
            await self._stop.wait()


@pytest.fixture
def gateway() -> Iterator[TimedGateway]:
    thread = GatewayThread()
    yield thread.start()
    thread.stop()


async def test_an_agent_that_blocks_for_a_minute_costs_no_episode_its_lease(gateway):
    """Two episodes; one blocks for 20 leases while the other is in the middle of its turns."""
    both, blocked_s, freed = asyncio.Barrier(2), [0.0, 0.0], asyncio.Event()

    async def agent(episode) -> None:
        await both.wait()
        if ".0." in episode.episode_id:
            blocked_s[0] = time.monotonic()
            time.sleep(BLOCKED_S)  # noqa: ASYNC251 - what this test is about
            blocked_s[1] = time.monotonic()
            freed.set()
        await freed.wait()
        await episode.chat([{"role": "user", "content": "go on"}])

    settings = AgentsSettings(
        configuration="-", gateway_url=gateway.url, admin_key="admin", poll_s=0.05
    )
    domains = {"count": DomainCode(task_source=numbered, play=agent)}
    run = configuration(slots=1, evaluation=Evaluation())
    async with asyncio.timeout(120):
        await play_run(run, settings, domains, {}, Telemetry(service="agents"))
    group = gateway.groups["g-count-0"]
    assert {index: attempt.number for index, attempt in group.attempts.items()} == {0: 0, 1: 0}
    assert all(isinstance(end, FinishRequest) for end in group.ended.values())
    for episode_id in ("g-count-0.0.0", "g-count-0.1.0"):
        during = [at for at in gateway.heard_s[episode_id] if blocked_s[0] <= at <= blocked_s[1]]
        gaps = [after - before for before, after in itertools.pairwise([*during, blocked_s[1]])]
        assert max(gaps) < LEASE_S
        assert len(during) >= BLOCKED_S / LEASE_S
