"""An episode whose agent speaks any protocol, over a gateway with scripted lanes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.episodes import FinishedEpisode
from tests.unit.gateway.scripted_lane import Asked, Script, ScriptedLane, contexts_of, wall_ms
from tests.unit.gateway.world import World, configuration_of, plain_http, running


class Talk:
    """One agent's episode: its clients, and what stands on the log."""

    def __init__(self, world: World, lanes: list[ScriptedLane], claim: Any) -> None:
        self.world, self._lanes, self.key = world, lanes, claim["key"]
        self.episode_id = claim["episode_id"]
        self.openai = world.client(claim)
        self.anthropic = AsyncAnthropic(
            api_key=claim["key"],
            base_url=world.base_url,
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=False),
        )

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Post a body as it is, with the episode's key."""
        async with plain_http() as client:
            return await client.post(
                f"{self.world.base_url}{path}",
                json=body,
                headers={"x-api-key": self.key, **headers},
            )

    async def restart(self) -> None:
        """Kill the gateway and start another one from the log."""
        await self.world.restart()
        self.openai.base_url = f"{self.world.base_url}/v1"

    def seen(self) -> list[Asked]:
        """What the lanes were asked."""
        return [asked for lane in self._lanes for asked in lane.seen]

    async def finished(self) -> list[Any]:
        """The records of its completions."""
        return await self.world.records(topics.FINISHED_COMPLETIONS)

    async def chain(self) -> list[list[int]]:
        """Context and output of every turn, in order."""
        finished = await self.finished()
        whole = contexts_of(finished)
        return [whole[record.request_id] for record in finished]

    async def end(self) -> FinishedEpisode:
        """Finish the episode; returns its final record."""
        await self.world.admin("POST", f"/v1/episodes/{self.episode_id}/finish", {})
        ended: list[FinishedEpisode] = await self.world.records(topics.FINISHED_EPISODES)
        return ended[0]


@asynccontextmanager
async def talk(
    model: Path, script: Script, *, context_tokens_max: int = 4096
) -> AsyncIterator[Talk]:
    """An open episode over lanes that answer by this script."""
    configuration = configuration_of(model, context_tokens_max=context_tokens_max)
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, script) as (world, lanes):
        talking = Talk(world, lanes, await world.episode())
        async with talking.anthropic:
            yield talking
