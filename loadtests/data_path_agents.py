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
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
from msgspec import Raw, Struct

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


class Usage(Struct, frozen=True):
    """Tokens of one chat completion."""

    prompt_tokens: int
    completion_tokens: int


class ReplyMessage(Struct, frozen=True):
    """The text that the stand-in engine made."""

    content: str | None = None


class Choice(Struct, frozen=True):
    """One choice of a chat completion."""

    message: ReplyMessage


class Reply(Struct, frozen=True):
    """The parts of a chat completion that an agent reads."""

    choices: list[Choice]
    usage: Usage


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


class Agents:
    """Plays one group after the other until it is cancelled."""

    def __init__(self, settings: AgentsSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
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
            asked = GroupRequest(domain=DOMAIN, idempotency_key=str(number), task=task)
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
            group_id, prompt = await self._free.get()
            asked = ClaimRequest(wait_s=_CLAIM_WAIT_S)
            claim = await self._ask(admin_routes.CLAIM_EPISODE, group_id, asked, Claim)
            await self._play(claim, list(prompt))

    async def _play(self, claim: Claim, messages: list[bytes]) -> None:
        dice = random.Random(claim.episode_id)
        for turn in range(self._settings.turns):
            if turn:
                messages.append(message("user", text(dice, self._settings.turn_words)))
            reply = await self._complete(claim, b",".join(messages))
            messages.append(message("assistant", reply.choices[0].message.content or ""))
        # Half of a group passes, so that its advantages are not all zero.
        reward = RewardRequest(reward_id="passed", name="passed", value=claim.index % 2)
        await self._ask(admin_routes.REPORT_REWARD, claim.episode_id, reward, Recorded)
        finish = FinishRequest(result=Raw(b'{"turns":%d}' % self._settings.turns))
        await self._ask(admin_routes.FINISH_EPISODE, claim.episode_id, finish, Recorded)

    async def _complete(self, claim: Claim, messages: bytes) -> Reply:
        body = b'{"model":"policy","max_tokens":%d,"messages":[%s]}' % (
            self._settings.tokens_max,
            messages,
        )
        headers = {"authorization": f"Bearer {claim.key}", "content-type": "application/json"}
        while True:
            began_s = time.monotonic()
            async with self._session.post(
                f"{self._settings.url}/v1/chat/completions",
                data=body,
                headers=headers,
            ) as response:
                answer = await response.read()
            if response.status == 200:
                break
            if response.status not in (429, 503):
                raise RuntimeError(f"a completion: {response.status} {answer[:300]!r}")
            self.refused += 1
            await asyncio.sleep(_RETRY_S)
        ended_s = time.monotonic()
        reply = msgspec.json.decode(answer, type=Reply)
        usage = reply.usage
        self.played.append(
            Played(
                ended_s,
                ended_s - began_s,
                usage.prompt_tokens,
                usage.completion_tokens,
                len(body),
                len(answer),
            )
        )
        return reply

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
    asyncio.run(main(parse(AgentsSettings, prefix="FORGEMQ_LOAD_AGENTS_", environ=os.environ)))
