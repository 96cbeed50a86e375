"""What the gateway expects of an engine's cache, beside what the engine says it had."""

import asyncio
import hashlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.weights import PublishedWeights, ReportedEngine
from forgemq_shell.records import emit_of
from tests.integration.test_reply_forms_engine import gateway_on
from tests.metered import counted, metered
from tests.unit.gateway.world import World

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GROUPS = 12
SIBLINGS = 2
TURNS = 5
TEMPERATURE = 5.0
# Another one begins the task of each group: what begins alike by chance is not expected.
LETTERS = "abcdefghijklmnopqrstuvwx"
WORDS = ("price", "lamp", "mug", "desk", "red", "total", "shelf", "stock", "green", "count")


class Conversation:
    """An episode whose user says other words every turn."""

    def __init__(self, world: World, claim: Any, *, task: str, dice: random.Random) -> None:
        self._chat = world.client(claim).chat.completions
        self._messages: list[Any] = [{"role": "user", "content": task}]
        self._dice = dice

    async def turn(self) -> None:
        answer = await self._chat.create(model="m", messages=self._messages, max_tokens=24)
        reply = answer.choices[0].message
        self._messages += [
            reply.model_dump(exclude_none=True),
            {"role": "user", "content": words(self._dice, 6)},
        ]


def words(dice: random.Random, count: int) -> str:
    return " ".join(dice.choices(WORDS, k=count))


async def play(world: World, *, first: int) -> None:
    """Begin one episode after the other, and play them side by side then."""
    episodes = []
    for number in range(first, first + GROUPS):
        dice = random.Random(number)
        # So high that siblings do not say the same.
        group_id = await world.open_group(f"k{number}", temperature=TEMPERATURE)
        task = f"{LETTERS[number]} {words(dice, 30)}"
        for _ in range(SIBLINGS):
            claim = await world.claim(group_id)
            episodes.append(Conversation(world, claim, task=task, dice=dice))
            await episodes[-1].turn()
    async with asyncio.TaskGroup() as tasks:
        for episode in episodes:
            tasks.create_task(play_on(episode))


async def play_on(episode: Conversation) -> None:
    for _ in range(TURNS - 1):
        await episode.turn()


async def publish(world: World, model: Path) -> None:
    """The same bytes under a new name; returns when the lane serves them."""
    data = await asyncio.to_thread((model / "model.safetensors").read_bytes)
    record = PublishedWeights(
        lineage=1,
        version=1,
        sha256=hashlib.sha256(data).hexdigest(),
        uri=str(model),
        size_bytes=len(data),
    )
    writer = await world.log.writer()
    output = Output(topic=topics.PUBLISHED_WEIGHTS.name, partition=0, record=record)
    await writer.write(emit_of(output))
    place = Place(topics.REPORTED_ENGINES.name, 0)
    reader = await world.log.reader(await world.log.end_positions([place]))
    async with asyncio.timeout(60):
        versions: set[int] = set()
        while 1 not in versions:
            records = await reader.read(timeout_s=1.0, records_max=100)
            reports = [topics.decode(topics.REPORTED_ENGINES, record.value) for record in records]
            versions = {report.version for report in reports if isinstance(report, ReportedEngine)}
    await reader.close()


async def test_engines_have_what_is_expected_of_them_before_and_after_an_update(
    base_engine_url: str, engine_model: Path
) -> None:
    telemetry, held = metered("gateway")
    async with gateway_on(base_engine_url, engine_model, telemetry=telemetry) as world:
        await play(world, first=0)
        await publish(world, engine_model)
        await play(world, first=GROUPS)
        outcomes = counted(held(), "gateway.cache_outcomes", by="outcome")
        finished: list[Any] = await world.records(topics.FINISHED_COMPLETIONS)
    versions = Counter(record.spans[0].version for record in finished)
    turns = GROUPS * SIBLINGS * TURNS
    assert versions == {0: turns, 1: turns}
    assert outcomes.total() == 2 * turns
    assert outcomes["as_expected"] >= 0.99 * outcomes.total(), outcomes
    cached = [record.cached_tokens for record in finished if record.parent_id is not None]
    assert min(cached) > 30, "each turn found the turn before it"
