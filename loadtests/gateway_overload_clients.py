"""Clients of `gateway_overload.py`: each plays short episodes and asks again when it is refused.

A client waits as long as Retry-After says, as agents' SDKs do. One line for each answer, also each
refusal, is written when the time is over.
"""

import asyncio
import os
import random
import time
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
from data_path_agents import DOMAIN, message, text
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
)
from forgemq_contracts.admin_routes import Route
from forgemq_settings.environment import parse

OK = 200
_CLAIM_WAIT_S = 20.0
_ADMIN_RETRY_S = 0.5
_TURNS = 8
_WORDS = 30
_TOKENS_MAX = 16

Answer = TypeVar("Answer")


class ClientsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many clients play for how long.

    Attributes:
        name: Begins the idempotency keys.
        out: File for one JSON line (`Answered`) for each answer.
    """

    url: str
    admin_key: str
    clients: int
    group_size: int
    seconds: float
    name: str
    out: str


class Answered(Struct, frozen=True):
    """One answer, as the client saw it; `ended_s` is monotonic time."""

    ended_s: float
    took_s: float
    status: int
    has_retry_after: bool


class Clients:
    """Plays until it is cancelled."""

    def __init__(self, settings: ClientsSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        self._admin = {"authorization": f"Bearer {settings.admin_key}"}
        self.answered: list[Answered] = []

    async def run(self) -> None:
        """Play all clients, a group of them at a time."""
        async with asyncio.TaskGroup() as tasks:
            for first in range(0, self._settings.clients, self._settings.group_size):
                tasks.create_task(self._play_groups(first))

    async def _play_groups(self, first: int) -> None:
        """Play one group after the other with as many clients as it has episodes."""
        number = 0
        while True:
            key = f"{self._settings.name}-{first}/{number}"
            asked = GroupRequest(domain=DOMAIN, idempotency_key=key, task=Raw(b"{}"))
            group = await self._ask(admin_routes.REQUEST_GROUP, "", asked, GroupStatus)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._settings.group_size):
                    tasks.create_task(self._play(group.group_id))
            number += 1

    async def _play(self, group_id: str) -> None:
        asked = ClaimRequest(wait_s=_CLAIM_WAIT_S)
        claim = await self._ask(admin_routes.CLAIM_EPISODE, group_id, asked, Claim)
        dice, messages = random.Random(claim.episode_id), list[bytes]()
        for _ in range(_TURNS):
            messages.append(message("user", text(dice, _WORDS)))
            said = await self._complete(claim, messages)
            messages.append(message("assistant", said))
        finish = FinishRequest(result=Raw(b"{}"))
        await self._ask(admin_routes.FINISH_EPISODE, claim.episode_id, finish, Recorded)

    async def _complete(self, claim: Claim, messages: list[bytes]) -> str:
        """The reply to these messages; asks until there is one."""
        speaker = SPEAKERS["chat"]
        body = speaker.body(messages, tokens_max=_TOKENS_MAX, is_stream=False)
        headers = {"authorization": f"Bearer {claim.key}", "content-type": "application/json"}
        while True:
            started_s = time.monotonic()
            async with self._session.post(
                self._settings.url + speaker.path, data=body, headers=headers
            ) as response:
                answer = await response.read()
            retry_after = response.headers.get("retry-after")
            ended_s = time.monotonic()
            self.answered.append(
                Answered(ended_s, ended_s - started_s, response.status, retry_after is not None)
            )
            if response.status == OK:
                return speaker.said(answer, is_stream=False).text
            await asyncio.sleep(float(retry_after or 1.0))

    async def _ask(self, route: Route, identity: str, body: Struct, kind: type[Answer]) -> Answer:
        """Call a route of the admin API until it answers with 200."""
        path = route.path.format(group_id=identity, episode_id=identity)
        while True:
            async with self._session.request(
                route.method,
                self._settings.url + path,
                data=msgspec.json.encode(body),
                headers=self._admin,
            ) as response:
                answer = await response.read()
            if response.status == OK:
                return msgspec.json.decode(answer, type=kind)
            await asyncio.sleep(_ADMIN_RETRY_S)


async def main(settings: ClientsSettings) -> None:
    """Play for the time, then write what was answered."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = Clients(settings, session)
        playing = asyncio.create_task(clients.run())
        await asyncio.wait([playing], timeout=settings.seconds)
        if playing.done():
            playing.result()
        playing.cancel()
        await asyncio.wait([playing])
    lines = msgspec.json.Encoder().encode_lines(clients.answered)
    await asyncio.to_thread(Path(settings.out).write_bytes, lines)


if __name__ == "__main__":
    asyncio.run(main(parse(ClientsSettings, prefix="FORGEMQ_LOAD_CLIENTS_", environ=os.environ)))
