"""Agents of the data path's load test: many episodes at once over plain HTTP, nothing computed.

Every turn sends all messages so far again, as agents do. They run in their own process, so that
their CPU time is measured apart; on SIGTERM it writes one line for each completion and ends.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
import uvloop
from msgspec import Raw, Struct
from protocol_speakers import SPEAKERS

from forgemq_contracts import admin_routes
from forgemq_contracts.admin import (
    Claim,
    ClaimRequest,
    FinishRequest,
    GroupRequest,
    GroupStatus,
    Recorded,
    RewardRequest,
)
from forgemq_contracts.admin_routes import Route
from forgemq_settings.environment import parse

DOMAIN = "data_path"
# A group is admitted when a slot is free, which takes as long as a step of the stand-in trainer.
_CLAIM_WAIT_S = 20.0
# Short beside the time of a completion, so that a refusal costs no throughput.
_RETRY_S = 0.1
# Turns that are due by the clock and have no agent for this long are not asked for later.
_BEHIND_S = 1.0
# Each word is one token of the demo's model, and so is the space after it.
_WORDS = (
    *("description", "parameters", "properties", "arguments", "assistant", "function", "product"),
    *("medium", "object", "string", "system", "price", "total", "color", "stock", "shelf", "lines"),
    *("large", "small", "green", "black", "white", "count", "pages", "clear"),
)

Answer = TypeVar("Answer")


class AgentsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How agents play; each turn adds a reply and `turn_words` to the messages.

    Attributes:
        agents: Episodes at once.
        prompt_messages: Messages before the first turn, the same for all episodes of a group.
        message_words: Length of each of them.
        turn_words: Length of every later message of the user.
        name: Begins the idempotency keys, so that agents with other names play other groups.
        protocol: Name of one of `SPEAKERS`.
        is_stream: Whether answers are asked for as streams.
        turns_per_second: 0: each agent asks for its next turn as soon as it has the last one.
            Otherwise each turn is due at a fixed time and goes to an agent that is free; how long
            a turn took counts from when it was due.
        out: File for one JSON line (`Played`) for each completion.
    """

    url: str
    admin_key: str
    agents: int
    group_size: int
    turns: int
    prompt_messages: int
    message_words: int
    turn_words: int
    tokens_max: int
    out: str
    name: str = "load"
    protocol: str = "chat"
    is_stream: bool = False
    turns_per_second: float = 0.0


class Played(Struct, frozen=True):
    """One completion, as the client saw it; `ended_s` is monotonic time."""

    ended_s: float
    took_s: float
    context_tokens: int
    output_tokens: int
    body_bytes: int
    reply_bytes: int


def message(role: str, content: str) -> bytes:
    """One message of a chat, as JSON."""
    return msgspec.json.encode({"role": role, "content": content})


@dataclass
class Episode:
    """A claimed episode while it is played: the messages that its next turn sends."""

    claim: Claim
    messages: list[bytes]
    dice: random.Random = field(kw_only=True)
    turns_left: int = field(kw_only=True)


class Agents:
    """Plays one group after the other until it is cancelled."""

    def __init__(self, settings: AgentsSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        self._speaker = SPEAKERS[settings.protocol]
        self._admin = {"authorization": f"Bearer {settings.admin_key}"}
        self._free: asyncio.Queue[tuple[str, list[bytes]]] = asyncio.Queue(
            maxsize=max(settings.group_size, settings.agents // 2)
        )
        self.played: list[Played] = []
        self.refused = 0

    async def run(self) -> None:
        """Wait for the gateway, then request groups and play their episodes."""
        await self._wait_for_gateway()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._request_groups())
            if self._settings.turns_per_second:
                tasks.create_task(self._play_by_the_clock(tasks))
                return
            for _ in range(self._settings.agents):
                tasks.create_task(self._play_on())

    async def _wait_for_gateway(self) -> None:
        while True:
            with suppress(aiohttp.ClientConnectionError):
                async with self._session.get(f"{self._settings.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_RETRY_S)

    async def _request_groups(self) -> None:
        for number in itertools.count():
            task = Raw(msgspec.json.encode({"k": number}))
            asked = GroupRequest(
                domain=DOMAIN, idempotency_key=f"{self._settings.name}/{number}", task=task
            )
            group = await self._ask(admin_routes.REQUEST_GROUP, "", asked, GroupStatus)
            prompt = self._prompt(number)
            for _ in range(self._settings.group_size):
                await self._free.put((group.group_id, prompt))

    def _prompt(self, number: int) -> list[bytes]:
        dice = random.Random(number)
        settings = self._settings
        return [
            message("assistant" if index % 2 else "user", text(dice, settings.message_words))
            for index in range(settings.prompt_messages)
        ]

    async def _play_on(self) -> None:
        while True:
            episode = await self._claimed()
            while episode.turns_left:
                await self._complete(episode, due_s=time.monotonic())
            await self._finish(episode)

    async def _claimed(self) -> Episode:
        group_id, prompt = await self._free.get()
        asked = ClaimRequest(wait_s=_CLAIM_WAIT_S)
        claim = await self._ask(admin_routes.CLAIM_EPISODE, group_id, asked, Claim)
        dice = random.Random(claim.episode_id)
        return Episode(claim, list(prompt), dice=dice, turns_left=self._settings.turns)

    async def _play_by_the_clock(self, tasks: asyncio.TaskGroup) -> None:
        """Start a turn whenever one is due, and give it to the agent that has waited longest."""
        due_s, waiting = time.monotonic(), asyncio.Queue[Episode]()
        for _ in range(self._settings.agents):
            tasks.create_task(self._replace(None, waiting))
        while True:
            episode = await waiting.get()
            due_s += 1 / self._settings.turns_per_second
            if due_s < time.monotonic() - _BEHIND_S:
                # All agents were busy, as before the first groups are open: begin again from now.
                due_s = time.monotonic()
            await asyncio.sleep(due_s - time.monotonic())
            tasks.create_task(self._play_one(episode, waiting, due_s=due_s))

    async def _play_one(
        self, episode: Episode, waiting: asyncio.Queue[Episode], *, due_s: float
    ) -> None:
        await self._complete(episode, due_s=due_s)
        if episode.turns_left:
            waiting.put_nowait(episode)
        else:
            await self._replace(episode, waiting)

    async def _replace(self, ended: Episode | None, waiting: asyncio.Queue[Episode]) -> None:
        if ended is not None:
            await self._finish(ended)
        waiting.put_nowait(await self._claimed())

    async def _finish(self, episode: Episode) -> None:
        claim = episode.claim
        # Half of a group passes, so that its advantages are not all zero.
        reward = RewardRequest(reward_id="passed", name="passed", value=claim.index % 2)
        await self._ask(admin_routes.REPORT_REWARD, claim.episode_id, reward, Recorded)
        finish = FinishRequest(result=Raw(b'{"turns":%d}' % self._settings.turns))
        await self._ask(admin_routes.FINISH_EPISODE, claim.episode_id, finish, Recorded)

    async def _complete(self, episode: Episode, *, due_s: float) -> None:
        """Play the next turn of the episode."""
        settings, messages = self._settings, episode.messages
        body = self._speaker.body(
            messages, tokens_max=settings.tokens_max, is_stream=settings.is_stream
        )
        answer = await self._answer(episode.claim, body)
        ended_s = time.monotonic()
        said = self._speaker.said(answer, is_stream=settings.is_stream)
        tokens = said.context_tokens, said.output_tokens
        self.played.append(Played(ended_s, ended_s - due_s, *tokens, len(body), len(answer)))
        episode.turns_left -= 1
        following = text(episode.dice, settings.turn_words)
        messages += [message("assistant", said.text), message("user", following)]

    async def _answer(self, claim: Claim, body: bytes) -> bytes:
        """The answer to this body; asks again while the gateway refuses for now."""
        headers = {"authorization": f"Bearer {claim.key}", "content-type": "application/json"}
        url = self._settings.url + self._speaker.path
        while True:
            async with self._session.post(url, data=body, headers=headers) as response:
                answer = await response.read()
            if response.status == 200:
                return answer
            if response.status not in (429, 503):
                raise RuntimeError(f"a completion: {response.status} {answer[:300]!r}")
            self.refused += 1
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, route: Route, identity: str, body: Struct, kind: type[Answer]) -> Answer:
        """Call a route on a group or an episode; repeat while the gateway refuses for now."""
        path = route.path.format(group_id=identity, episode_id=identity)
        while True:
            async with self._session.request(
                route.method,
                self._settings.url + path,
                data=msgspec.json.encode(body),
                headers=self._admin,
            ) as response:
                answer = await response.read()
            if response.status == 200:
                return msgspec.json.decode(answer, type=kind)
            if response.status not in (204, 429, 503):
                raise RuntimeError(f"{path}: {response.status} {answer[:300]!r}")
            await asyncio.sleep(_RETRY_S)


def text(dice: random.Random, words: int) -> str:
    """Random words, separated by spaces."""
    return " ".join(dice.choices(_WORDS, k=words))


async def main(settings: AgentsSettings) -> None:
    """Play until SIGTERM, then write what was played."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        agents = Agents(settings, session)
        playing = asyncio.create_task(agents.run())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([playing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            playing.result()
        playing.cancel()
        lines = b"".join(msgspec.json.encode(played) + b"\n" for played in agents.played)
        await asyncio.to_thread(Path(settings.out).write_bytes, lines)
        await asyncio.wait([playing])


if __name__ == "__main__":
    uvloop.run(main(parse(AgentsSettings, prefix="FORGEMQ_LOAD_AGENTS_", environ=os.environ)))
