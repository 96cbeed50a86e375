"""Agents of the data path's load test: many episodes at once over plain HTTP, nothing computed.

Every turn sends the whole history again, as agents do. A process of its own, so that its CPU time
can be told apart; on SIGTERM it writes one line a completion and ends.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from forgemq_settings.environment import parse

DOMAIN = "data_path"
_CLAIM_WAIT_S = 20
_RETRY_S = 0.1
# Each is one token of the demo's model, and so is the space behind it.
_WORDS = (
    *("description", "parameters", "properties", "arguments", "assistant", "function", "product"),
    *("medium", "object", "string", "system", "price", "total", "color", "stock", "shelf", "lines"),
    *("large", "small", "green", "black", "white", "count", "pages", "clear"),
)

Answer = TypeVar("Answer")


class AgentsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How agents play; the history grows by a reply and `turn_words` each turn.

    Attributes:
        agents: Episodes at once.
        prompt_messages: Messages before the first turn, the same for all episodes of a group.
        message_words: In each of them.
        turn_words: Of every later message of the user.
        out: One JSON line a completion: when it ended (monotonic, s), how long it took, its tokens.
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
    """Of a reply."""

    prompt_tokens: int
    completion_tokens: int


class ReplyMessage(Struct, frozen=True):
    """Of a reply; what the policy said."""

    content: str | None = None


class Choice(Struct, frozen=True):
    """Of a reply."""

    message: ReplyMessage


class Reply(Struct, frozen=True):
    """The part of a chat completion that goes back into the history."""

    choices: list[Choice]
    usage: Usage


class Claimed(Struct, frozen=True):
    """The part of a claim that an agent needs."""

    episode_id: str
    index: int
    key: str


class Done(Struct, frozen=True):
    """An answer with nothing in it."""


class OpenedGroup(Struct, frozen=True):
    """The part of a group that an agent needs."""

    group_id: str


class Played(Struct, frozen=True):
    """One completion, as the client saw it."""

    ended_s: float
    took_s: float
    context_tokens: int
    output_tokens: int


def message(role: str, content: str) -> bytes:
    """One message of a history, as JSON."""
    return msgspec.json.encode({"role": role, "content": content})


class Agents:
    """Plays groups without end."""

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
        """Wait for the gateway, then open groups and play their episodes until cancelled."""
        await self._wait_for_gateway()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._open_groups())
            for _ in range(self._settings.agents):
                tasks.create_task(self._play_on())

    async def _wait_for_gateway(self) -> None:
        while True:
            with suppress(aiohttp.ClientConnectionError):
                async with self._session.get(f"{self._settings.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_RETRY_S)

    async def _open_groups(self) -> None:
        for number in self._numbers():
            asked = {"domain": DOMAIN, "idempotency_key": str(number), "task": {"k": number}}
            group = await self._ask("/v1/groups", asked, OpenedGroup)
            prompt = self._prompt(number)
            for _ in range(self._settings.group_size):
                await self._free.put((group.group_id, prompt))

    def _numbers(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    def _prompt(self, number: int) -> list[bytes]:
        dice = random.Random(number)
        settings = self._settings
        return [
            message("assistant" if place % 2 else "user", text(dice, settings.message_words))
            for place in range(settings.prompt_messages)
        ]

    async def _play_on(self) -> None:
        while True:
            group_id, prompt = await self._free.get()
            asked = {"wait_s": _CLAIM_WAIT_S}  # Until the group is admitted.
            claimed = await self._ask(f"/v1/groups/{group_id}/claim", asked, Claimed)
            await self._play(claimed, list(prompt))

    async def _play(self, claimed: Claimed, history: list[bytes]) -> None:
        dice = random.Random(claimed.episode_id)
        for turn in range(self._settings.turns):
            if turn:
                history.append(message("user", text(dice, self._settings.turn_words)))
            reply = await self._complete(claimed, b",".join(history))
            history.append(message("assistant", reply.choices[0].message.content or ""))
        path = f"/v1/episodes/{claimed.episode_id}"
        # Half of a group passes, so that its advantages are not all zero.
        reward = {"reward_id": "passed", "name": "passed", "value": claimed.index % 2}
        await self._ask(f"{path}/rewards", reward, Done)
        await self._ask(f"{path}/finish", {"result": {"turns": self._settings.turns}}, Done)

    async def _complete(self, claimed: Claimed, history: bytes) -> Reply:
        body = b'{"model":"policy","max_tokens":%d,"messages":[%s]}'
        headers = {"authorization": f"Bearer {claimed.key}", "content-type": "application/json"}
        while True:
            began_s = time.monotonic()
            async with self._session.post(
                f"{self._settings.url}/v1/chat/completions",
                data=body % (self._settings.tokens_max, history),
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
            Played(ended_s, ended_s - began_s, usage.prompt_tokens, usage.completion_tokens)
        )
        return reply

    async def _ask(self, path: str, body: object, kind: type[Answer]) -> Answer:
        """POST the body to the admin API, or GET where there is none; waits out what is busy."""
        while True:
            async with self._session.request(
                "GET" if body is None else "POST",
                self._settings.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers=self._admin,
            ) as response:
                answer = await response.read()
            if response.status == 200:
                return msgspec.json.decode(answer, type=kind)
            if response.status not in (204, 429, 503):
                raise RuntimeError(f"{path}: {response.status} {answer[:300]!r}")
            await asyncio.sleep(_RETRY_S)


def text(dice: random.Random, words: int) -> str:
    """So many words."""
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
