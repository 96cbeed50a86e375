"""The record that opened an episode is torn on the log: the next gateway goes on, and says so."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from forgemq_bus.log import Emit, Record
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import dead_letters_of
from forgemq_contracts import topics
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.hindered_log import HinderedLog, HinderedWriter
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import World, configuration_of, plain_http, running

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
OPENED = topics.OPENED_EPISODES


async def whole(_: Emit) -> None:
    """Hinder no record."""


class TearingWriter(HinderedWriter):
    """Writes the first half of each record that opens attempt 0 of episode 0."""

    async def write(self, emit: Emit) -> Any:
        return await self._writer.write(torn(emit))

    async def commit(self, *, outputs: Sequence[Emit], **rest: Any) -> None:
        await self._writer.commit(outputs=[*map(torn, outputs)], **rest)


class TearingLog(HinderedLog):
    async def writer(self) -> TearingWriter:
        return TearingWriter(await self._log.writer(), self._hinder)

    async def transaction_writer(self, transactional_id: str) -> TearingWriter:
        return TearingWriter(await self._log.transaction_writer(transactional_id), self._hinder)


def torn(emit: Emit) -> Emit:
    is_first = emit.topic == OPENED.name and emit.key.endswith(b".0.0")
    return replace(emit, value=emit.value[: len(emit.value) // 2]) if is_first else emit


async def turn(world: World, claim: Any) -> int:
    """The status of a turn, asked of the newest gateway."""
    url = f"{world.base_url}/v1/chat/completions"
    async with plain_http(timeout_s=10) as client:
        answer = await client.post(url, json=BODY, headers={"x-api-key": claim["key"]})
    return answer.status_code


async def letters_of(world: World) -> list[Record]:
    reader = await world.log.reader({dead_letters_of(OPENED): 0})
    try:
        return await reader.read(timeout_s=0.1, records_max=100)
    finally:
        await reader.close()


async def test_a_torn_opening_costs_its_episode_only_and_has_one_letter_and_a_line(
    model: Path,
) -> None:
    store, lines = MemoryLog(run="r", clock_ms=wall_ms), io.StringIO()
    await store.open().create_topics({OPENED.dlq_name: 1})
    telemetry = Telemetry(service="gateway", stream=lines)
    async with running(
        lambda: TearingLog(store.open(), whole),
        configuration_of(model),
        lambda _: "yes",
        telemetry=telemetry,
    ) as (world, _):
        group = await world.open_group()
        claims = [await world.claim(group) for _ in range(2)]
        before = [await turn(world, claim) for claim in claims]
        await world.restart()
        after = [await turn(world, claim) for claim in claims]
        await world.restart()
        letters = await letters_of(world)
    assert [claim["episode_id"] for claim in claims] == [f"{group}.0.0", f"{group}.1.0"]
    assert (before, after) == ([200, 200], [404, 200])
    (letter,) = letters
    headers = dict(letter.headers)
    assert headers["group"] == group.encode()  # By it the scheduler fails the group.
    assert headers["reason"].startswith(b"does not decode: no OpenedEpisode: Input data was")
    events = [json.loads(line) for line in lines.getvalue().splitlines()]
    told = [event["topic"] for event in events if event["event"] == "bad_record"]
    assert told == [OPENED.name, OPENED.name]  # One at each start that reads it.
