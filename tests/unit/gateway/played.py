"""Episodes of white-box agents over a gateway with scripted lanes, and what they sent."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from forgemq_agents.episode import Episode
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.admin import Claim, FinishRequest
from forgemq_contracts.completions import FinishedCompletion
from forgemq_gateway.core.requests import chat_json
from forgemq_gateway.protocols.chat_body import request_of
from forgemq_launcher.records.sent_replies import sent_reply
from forgemq_rendering import Rendering
from forgemq_run_view.sent_requests import SentRequest, sent_requests
from forgemq_telemetry import Telemetry
from tests.unit.gateway.scripted_lane import Script, ScriptedLane, wall_ms
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of, running


class Sent:
    """Passes an episode's requests on, and keeps the messages of each as they were sent."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.messages: list[bytes] = []

    @property
    def context_tokens_max(self) -> int:
        return self.episode.context_tokens_max

    def truncate(self, cause: Any) -> None:
        self.episode.truncate(cause)

    async def chat(self, messages, *, tools=(), cuts=()):
        completion = await self.episode.chat(messages, tools=tools, cuts=cuts)
        self.messages.append(canonical(messages))
        return completion


def canonical(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The messages as the gateway reads and writes them: bytes to compare."""
    body = msgspec.json.encode({"model": "m", "messages": list(messages)})
    return chat_json(request_of(body, None).messages)


class PlayedRun:
    """One group, whose episodes are played one after the other."""

    def __init__(self, world: World, lanes: list[ScriptedLane], http: aiohttp.ClientSession):
        self.world, self.lanes = world, lanes
        self.requests = JsonRequests(http, retry=Retry(deadline_s=30))
        self.gateway = GatewayClient(self.requests, url=world.base_url, admin_key=ADMIN_KEY)
        self.sent: dict[str, Sent] = {}

    async def play(self, group_id: str, play: Callable[[Sent], Awaitable[Any]]) -> str:
        """Claim an episode, play and finish it; returns its id."""
        claim = await self.gateway.claim(group_id)
        assert isinstance(claim, Claim)
        silent = Telemetry(service="agents")
        episode = Episode(
            claim, gateway=self.gateway, requests=self.requests, environ={}, telemetry=silent
        )
        self.sent[claim.episode_id] = sent = Sent(episode)
        await play(sent)
        await self.gateway.finish(claim.episode_id, FinishRequest())
        return claim.episode_id

    async def completions(self) -> dict[str, FinishedCompletion]:
        """The completions on the log, by id."""
        records = await self.world.records(topics.FINISHED_COMPLETIONS)
        return {record.request_id: record for record in records}

    async def rebuilt(self) -> dict[str, list[SentRequest]]:
        """The requests of each episode, from the log and the model's folder alone."""
        rendering = Rendering.load(self.world.configuration.model.path)

        def read_reply(completion, context, tools):
            return sent_reply(completion, rendering=rendering, context=context, tools=tools)

        found: dict[str, list[SentRequest]] = {}
        for request in sent_requests(await self.completions(), read_reply=read_reply):
            found.setdefault(request.episode_id, []).append(request)
        return found

    def seen(self) -> dict[str, list[int]]:
        """The token ids that a lane was given, by completion."""
        return {each.record.request_id: each.context for lane in self.lanes for each in lane.seen}


@asynccontextmanager
async def played_run(
    model: Path, script: Script, *, context_tokens_max: int
) -> AsyncIterator[PlayedRun]:
    """A run without episodes."""
    configuration = configuration_of(model, context_tokens_max=context_tokens_max)
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with (
        running(log, configuration, script) as (world, lanes),
        aiohttp.ClientSession() as web,
    ):
        yield PlayedRun(world, lanes, web)
