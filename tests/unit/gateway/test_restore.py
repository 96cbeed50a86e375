"""A restart reads what open episodes need, and passes over the rest undecoded."""

import io
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forgemq_bus.log import Emit, Log, Place, Reader
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.curriculum import Curriculum
from forgemq_contracts.groups import RetiredGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_gateway.core.registry import RETIRED_STATUSES_MAX
from forgemq_gateway.marks import NEEDED_GROUP
from forgemq_shell.records import emit_of
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, wall_ms
from tests.unit.gateway.test_task_results import result_of
from tests.unit.gateway.world import World, configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
UNREADABLE = b"\xc1"


def log_store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


async def asked(world: World, claim: Any, *, turns: int = 1) -> Any:
    """The agent's answer after so many turns."""
    here = {**claim, "base_url": f"{world.base_url}/v1"}
    messages = HELLO + [{"role": "assistant", "content": "yes"}, *HELLO] * (turns - 1)
    return await world.client(here).chat.completions.create(model="policy", messages=messages)


async def ended(world: World, claim: Any) -> int:
    path = f"/v1/episodes/{claim['episode_id']}/finish"
    return (await world.admin("POST", path, {})).status_code


async def write_unreadable(world: World, group: str) -> None:
    """A record about a completion of this group that no reader can decode."""
    topic, headers = topics.DELIVERED_COMPLETIONS.name, (("group", group.encode()),)
    writer = await world.log.writer()
    await writer.write(Emit(topic=topic, partition=0, key=b"k", value=UNREADABLE, headers=headers))
    await writer.close()


async def test_only_completions_of_open_episodes_are_restored(model: Path) -> None:
    """One group retires; of the other, one episode has ended and one is in its second turn."""
    lines, opener = io.StringIO(), log_store()
    telemetry = Telemetry(service="gateway", stream=lines)
    dead = Place(topics.DELIVERED_COMPLETIONS.dlq_name, 0)
    await opener().create_topics({dead.topic: GROUP_PARTITIONS})
    async with running(opener, configuration_of(model), lambda _: "yes", telemetry=telemetry) as (
        world,
        _,
    ):
        over, group = await world.open_group("k1"), await world.open_group("k2")
        claims = [await world.claim(each) for each in (over, group, group)]
        for claim in claims:
            await asked(world, claim)
        assert await ended(world, claims[1]) == 200
        await world.retire(over)
        await write_unreadable(world, over)
        await world.eventually(topics.RETIRED_GROUPS, 1)
        await world.stop()
        await world.start_another()
        second = await asked(world, claims[2], turns=2)
        statuses = [await ended(world, claim) for claim in claims]
        letters = await world.log.end_positions([dead])
        finals = await world.records(topics.FINISHED_EPISODES)
    events = [json.loads(line) for line in lines.getvalue().splitlines()]
    event = [each for each in events if each["event"] == "restored"][-1]
    assert (event["groups"], event["completions"]) == (1, 1)
    assert second.choices[0].message.content == "yes"
    assert statuses == [410, 200, 200]
    assert sorted(len(final.manifest) for final in finals) == [1, 2]
    assert letters == {dead: 0}


def retired_in(partition: int, count: int) -> list[RetiredGroup]:
    """So many groups of one partition, in the order in which they retire."""
    names = (f"g-{number}" for number in itertools.count())
    of_partition = (
        n for n in names if group_partition(n, partitions=GROUP_PARTITIONS) == partition
    )
    return [
        RetiredGroup(group_id=name, domain="shop", purpose="train", reason="zero_variance")
        for name in itertools.islice(of_partition, count)
    ]


async def retire_all(log: Log, groups: dict[int, list[RetiredGroup]]) -> None:
    """Retire them, and commit that a gateway needs none of their records."""
    writer = await log.transaction_writer("retiring")
    outputs = [
        emit_of(Output(topic=topics.RETIRED_GROUPS.name, partition=partition, record=record))
        for partition, records in groups.items()
        for record in records
    ]
    await writer.commit(outputs=outputs, group="scheduler", positions={})
    ends = await log.end_positions([Place(topics.RETIRED_GROUPS.name, n) for n in groups])
    await writer.commit(outputs=(), group=NEEDED_GROUP, positions=ends)
    await writer.close()


class CountedReader:
    """A reader that notes the topic of each record that it gives."""

    def __init__(self, reader: Reader, given: Counter[str]) -> None:
        self._reader, self._given = reader, given

    async def read(self, **limits: Any) -> Any:
        records = await self._reader.read(**limits)
        self._given.update(record.topic for record in records)
        return records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class CountedLog:
    """A log with such readers."""

    def __init__(self, log: Log, given: Counter[str]) -> None:
        self._log, self._given = log, given

    async def reader(self, *of: Any, **how: Any) -> CountedReader:
        return CountedReader(await self._log.reader(*of, **how), self._given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


@pytest.mark.slow
async def test_a_start_reads_no_more_retired_groups_than_it_tells_of(model: Path) -> None:
    retired = {n: retired_in(n, RETIRED_STATUSES_MAX) for n in range(GROUP_PARTITIONS)}
    opener, given = log_store(), Counter[str]()
    async with running(opener, configuration_of(model), lambda _: "yes") as (world, _):
        await world.stop()
        await retire_all(world.log, retired)
        world.open_log = lambda: CountedLog(opener(), given)
        await world.start_another()
        ends = [record for records in retired.values() for record in (records[0], records[-1])]
        asked = [f"/v1/groups/{record.group_id}" for record in ends]
        answers = [(await world.admin("GET", path)).status_code for path in asked]
    assert answers == [404, 200] * GROUP_PARTITIONS
    assert 0 < given[topics.RETIRED_GROUPS.name] <= RETIRED_STATUSES_MAX


async def test_of_groups_before_the_newest_a_start_knows_the_result_alone(model: Path) -> None:
    run = configuration_of(model)
    curriculum = Curriculum(sampler="age", tasks=20)
    queue = msgspec.structs.replace(run.queues[0], curriculum=curriculum)
    configuration = msgspec.structs.replace(run, queues=(queue,))
    retired = [
        msgspec.structs.replace(record, result=result_of(index))
        for index, record in enumerate(retired_in(0, RETIRED_STATUSES_MAX // GROUP_PARTITIONS + 9))
    ]
    async with running(log_store(), configuration, lambda _: "yes") as (world, _):
        await world.stop()
        await retire_all(world.log, {0: retired})
        await world.start_another()
        asked = [f"/v1/groups/{record.group_id}" for record in (retired[0], retired[-1])]
        answers = [(await world.admin("GET", path)).status_code for path in asked]
        told = (await world.admin("GET", "/v1/domains/shop/results?after=0")).json()["results"]
    assert answers == [404, 200]
    assert told[0]["number"] == 1
