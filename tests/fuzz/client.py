"""A process that sends fuzzed bodies to a gateway, cuts some connections, and checks each answer.

It plays episodes: each has some requests and is finished then. Every 10th request is sound and goes
on with a conversation of its protocol.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from random import Random
from typing import Any, Literal

import aiohttp
import msgspec
from msgspec import Struct

from tests.fuzz.answers import PROTOCOLS, Answered, Protocol, continued, defect, request_id
from tests.fuzz.bodies import fuzzed

REQUESTS_OF_EPISODE = 200
"""Fewer than the paths that an episode may have."""

SOUND_EVERY = 10
WORKERS = 8
ANSWER_S = 30.0
"""A turn of the scripted lane takes milliseconds."""

Cut = Literal["", "body", "waiting", "answer"]
_CUTS: tuple[Cut, ...] = ("body", "waiting", "answer")


class Plan(Struct, frozen=True, kw_only=True):
    """What a client is to do; bodies are numbered from `first` on."""

    url: str
    admin_key: str
    first: int
    count: int


class Played(Struct, kw_only=True):
    """What came of it.

    Attributes:
        answers: How many by status, "stream" and "cut".
        defects: What was wrong, with the number of the body.
        delivered: By episode, the turns whose answers were read to their ends.
    """

    answers: dict[str, int] = {}
    defects: list[str] = []
    delivered: dict[str, list[str]] = {}


class Worker:
    """Plays one episode after the other.

    Args:
        opening: Of all workers: few groups may wait for a slot.
    """

    def __init__(
        self, session: aiohttp.ClientSession, plan: Plan, played: Played, *, opening: asyncio.Lock
    ) -> None:
        self._session = session
        self._plan = plan
        self._played = played
        self._opening = opening
        self._talks: dict[str, dict[str, Any]] = {}

    async def play(self, numbers: range) -> None:
        """Send the bodies of these numbers, the same number always the same body."""
        for start in range(0, len(numbers), REQUESTS_OF_EPISODE):
            some = numbers[start : start + REQUESTS_OF_EPISODE]
            async with self._opening:
                claim = await self._claim(f"fuzz-{some[0]}")
            self._talks.clear()
            for number in some:
                await self._send(number, claim)
            path = f"/v1/episodes/{claim['episode_id']}/finish"
            await self._admin(path, {}, number=some[-1])

    async def _claim(self, key: str) -> Any:
        group = {"domain": "shop", "idempotency_key": key, "task": {"n": 1}}
        opened = await self._admin("/v1/groups", group, number=key)
        path = f"/v1/groups/{opened['group_id']}/claim"
        return await self._admin(path, {"wait_s": 10}, number=key)

    async def _admin(self, path: str, body: Any, *, number: object) -> Any:
        headers = {"authorization": f"Bearer {self._plan.admin_key}"}
        url = self._plan.url + path
        async with self._session.post(url, json=body, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{number}: {path} {answer.status} {await answer.text()}")
            return await answer.json()

    async def _send(self, number: int, claim: Any) -> None:
        random = Random(number)
        protocol = random.choice(PROTOCOLS)
        sound = self._talks.get(protocol.path, protocol.plain)
        is_sound = number % SOUND_EVERY == 0
        if is_sound:
            body, cut = msgspec.json.encode(sound | {"stream": random.random() < 0.3}), ""
        else:
            spoilt = sound if random.random() < 0.2 else protocol.sound
            body = fuzzed(random, spoilt | {"stream": random.random() < 0.3})
            cut = _cut(random)
        headers = {"x-api-key": claim["key"], "content-type": "application/json"}
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._asked(protocol, body, headers=headers, cut=cut, random=random)
        except _CutError:
            self._count("cut")
            return
        except (TimeoutError, aiohttp.ClientError) as error:
            self._played.defects.append(f"{number}: no answer, {error!r}")
            return
        self._count("stream" if answer.is_stream else str(answer.status))
        wrong = defect(protocol, answer)
        if is_sound:
            wrong = wrong or self._refused(answer)
            self._go_on(protocol, sound, answer)
        if wrong:
            self._played.defects.append(f"{number}: {protocol.path}: {wrong}")
        elif answer.status == 200 and '"error"' not in answer.text[-2000:]:
            turns = self._played.delivered.setdefault(claim["episode_id"], [])
            turns.append(request_id(protocol, answer))

    def _refused(self, answer: Answered) -> str:
        is_answer = answer.status == 200 or "context_length_exceeded" in answer.text
        return "" if is_answer else f"a sound request is refused: {answer.text[:300]}"

    def _go_on(self, protocol: Protocol, sound: dict[str, Any], answer: Answered) -> None:
        """Keep the next request of the conversation, unless the last one was refused."""
        if answer.status != 200:
            self._talks.pop(protocol.path, None)
        elif not answer.is_stream:
            self._talks[protocol.path] = continued(protocol, sound, answer.text)

    def _count(self, name: str) -> None:
        self._played.answers[name] = self._played.answers.get(name, 0) + 1

    async def _asked(
        self,
        protocol: Protocol,
        body: bytes,
        *,
        headers: dict[str, str],
        cut: Cut,
        random: Random,
    ) -> Answered:
        """The whole answer.

        Raises:
            _CutError: the connection was cut, as it should be.
        """
        url = self._plan.url + protocol.path
        data = _half(body) if cut == "body" else body
        asking = self._session.post(url, data=data, headers=headers)
        try:
            async with asyncio.timeout(random.random() / 20 if cut == "waiting" else None):
                answer = await asking
        except TimeoutError as error:
            if cut == "waiting":
                raise _CutError from error
            raise
        except aiohttp.ClientError as error:
            if cut == "body":
                raise _CutError from error
            raise
        async with answer:
            if cut == "answer":
                await answer.content.readany()
                answer.close()
                raise _CutError
            is_stream = answer.content_type == "text/event-stream"
            text = await answer.text()
            return Answered(status=answer.status, is_stream=is_stream, text=text)


class _CutError(Exception):
    """The connection was cut here."""


def _cut(random: Random) -> Cut:
    return random.choice(_CUTS) if random.random() < 0.05 else ""


async def _half(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    raise aiohttp.ClientPayloadError("cut here")


async def play(plan: Plan) -> Played:
    """Send all bodies of a plan, some of them at once."""
    played, opening = Played(), asyncio.Lock()
    numbers = range(plan.first, plan.first + plan.count)
    connector = aiohttp.TCPConnector(limit=2 * WORKERS)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        share = -(-len(numbers) // WORKERS)
        for start in range(0, len(numbers), share):
            worker = Worker(session, plan, played, opening=opening)
            tasks.create_task(worker.play(numbers[start : start + share]))
    return played


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        given = msgspec.json.decode(sys.argv[1], type=Plan)
        sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(play(given))))
