"""One idempotency key asks for one group, and a domain has at most so many that wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.groups import RequestedGroup
from forgemq_gateway.core.episodes import GroupFacts
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.repeated import check_same
from tests.unit.gateway.hindered_log import HinderedLog
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of, plain_http, running

HUGE = b"1e999"  # No float is so large.


class HeldRequests:
    """Lets every record of a requested group wait, and counts those that do."""

    def __init__(self) -> None:
        self.count = 0
        self.begun, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, emit: Emit) -> None:
        if emit.topic == topics.REQUESTED_GROUPS.name:
            self.count += 1
            self.begun.set()
            await self.released.wait()


@asynccontextmanager
async def held_world(model: Path) -> AsyncIterator[tuple[World, HeldRequests]]:
    store, held = MemoryLog(run="r", clock_ms=wall_ms), HeldRequests()
    configuration = configuration_of(model)
    async with running(lambda: HinderedLog(store.open(), held), configuration, str) as (world, _):
        yield world, held


def ask(world: World, key: str, task: object) -> "asyncio.Task[Any]":
    body = {"domain": "shop", "idempotency_key": key, "task": task}
    return asyncio.create_task(world.admin("POST", "/v1/groups", body))


async def test_of_two_requests_at_once_with_one_key_the_second_is_compared_with_the_first(
    model: Path,
) -> None:
    async with held_world(model) as (world, held):
        answers = [ask(world, "k", {"n": 1}), ask(world, "k", {"n": 1}), ask(world, "k", {"n": 2})]
        await asyncio.sleep(0.1)
        held.released.set()
        statuses = sorted([(await answer).status_code for answer in answers])
        written = await world.records(topics.REQUESTED_GROUPS)
    assert statuses in ([200, 200, 409], [200, 409, 409])
    assert len(written) == 1


async def test_requests_at_once_pass_no_limit_and_one_commit_is_made_at_a_time(
    model: Path,
) -> None:
    async with held_world(model) as (world, held):
        answers = [ask(world, f"k{number}", {}) for number in range(5)]
        await asyncio.wait_for(held.begun.wait(), 10)
        await asyncio.sleep(0.1)
        first = held.count
        held.released.set()
        statuses = sorted([(await answer).status_code for answer in answers])
    assert (first, held.count) == (1, 3)
    assert world.configuration.queues[0].groups_requested_max == 3
    assert statuses == [200, 200, 200, 429, 429]


@pytest.mark.parametrize(
    ("task", "is_same"), [(b'{"a":1, "n":%b}', False), (b'{"n":%b,"a":1}', True)]
)
def test_a_repeated_task_with_a_number_beyond_every_float_is_compared_by_its_bytes(
    task: bytes, *, is_same: bool
) -> None:
    first = b'{"n":%b,"a":1}' % HUGE
    record = RequestedGroup(
        group_id="g-1",
        domain="shop",
        purpose="train",
        group_size=2,
        task=first,
        idempotency_key="k",
        requested_ms=0,
    )
    facts = GroupFacts(**{name: getattr(record, name) for name in GroupFacts.__struct_fields__})
    again = msgspec.structs.replace(record, task=task % HUGE)
    if is_same:
        check_same(facts, again)
        return
    with pytest.raises(RefusedError, match="task: the key 'k' asked for another group"):
        check_same(facts, again)


@pytest.mark.parametrize("number", [b"1e400", b"-1E+0999", b"1" * 310 + b".0", b"7" * 4301])
async def test_a_number_that_no_agent_or_grader_could_decode_is_refused_by_its_field(
    model: Path, number: bytes
) -> None:
    """Of a task and of a result; a text may say the same."""
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), str) as (world, _):
        claim = await world.episode()
        ends = f"/v1/episodes/{claim['episode_id']}/finish"
        task = await posted(
            world, "/v1/groups", b'{"domain":"shop","idempotency_key":"k","task":%b}', number
        )
        result = await posted(world, ends, b'{"result":{"score":[%b]}}', number)
        told = await posted(world, ends, b'{"result":"%b"}', number)
    rule = "a number must fit in 64 bits as a float, or have at most 4300 digits: "
    for answer, field in ((task, "task"), (result, "result")):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert error["message"].startswith(f"{field}: {rule}")
    assert told.status_code == 200


async def posted(world: World, path: str, body: bytes, value: bytes) -> httpx.Response:
    async with plain_http() as client:
        return await client.post(
            f"{world.base_url}{path}",
            content=body % value,
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
        )
