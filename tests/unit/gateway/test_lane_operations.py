"""Lanes are added, drained and removed over HTTP while agents play."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.lane_plan import RequestedLane
from forgemq_contracts.run import LogLayout
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, Asked, ScriptedLane, wall_ms
from tests.unit.gateway.world import World, configuration_of, running

MESSAGES: Any = [{"role": "user", "content": "go"}]


@asynccontextmanager
async def lanes_of(
    model: Path, *, lanes: int, script: Callable[[Asked], Any] = lambda _: "yes"
) -> AsyncIterator[tuple[World, list[ScriptedLane]]]:
    """A run that begins with two lanes and has room for three."""
    configuration = msgspec.structs.replace(
        configuration_of(model),
        log=LogLayout(group_partitions=GROUP_PARTITIONS, lanes=2, lanes_max=3),
    )
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, script, lanes=lanes) as (world, scripted):
        yield world, scripted


async def listed(world: World) -> dict[int, dict[str, Any]]:
    answer = await world.admin("GET", "/v1/lanes")
    assert answer.status_code == 200, answer.text
    return {lane["lane"]: lane for lane in answer.json()["lanes"]}


async def until_taking(world: World, taking: set[int]) -> None:
    async with asyncio.timeout(10):
        while True:
            found = {n for n, lane in (await listed(world)).items() if lane["takes_requests"]}
            if found == taking:
                return
            await asyncio.sleep(0.05)


async def test_lanes_are_listed_with_what_is_wanted_and_what_they_say(model: Path):
    async with lanes_of(model, lanes=1) as (world, _):
        await until_taking(world, {0})
        lanes = await listed(world)
        assert [lane["state"] for lane in lanes.values()] == ["serving", "serving"]
        assert lanes[0]["epoch"] == 1
        assert lanes[0]["silent_s"] < 5
        assert (lanes[1]["silent_s"], lanes[1]["takes_requests"]) == (None, False)
        assert (await world.admin("GET", "/v1/lanes")).json()["lanes_max"] == 3


async def test_a_lane_gets_requests_only_while_the_plan_has_it(model: Path):
    """Lane 2 reports from the start; it is idle, so it would be chosen."""
    async with lanes_of(model, lanes=3) as (world, scripted):
        await until_taking(world, {0, 1})
        claim = await world.episode()
        client = world.client(claim)
        for lane in (0, 1):
            added = 2 - lane
            if lane == 0:
                answer = await world.admin("POST", "/v1/lanes", {"engine_url": "http://e:1"})
                assert (answer.status_code, answer.json()["lane"]) == (200, added)
            answer = await world.admin("POST", f"/v1/lanes/{lane}/drain")
            assert (answer.status_code, answer.json()["state"]) == (200, "drained")
        await until_taking(world, {2})
        before = len(scripted[2].seen)
        await client.chat.completions.create(model="m", messages=MESSAGES)
        assert [len(scripted[0].seen), len(scripted[1].seen)] == [0, 0]
        assert len(scripted[2].seen) == before + 1
        answer = await world.admin("POST", "/v1/lanes/0/resume")
        assert (answer.status_code, answer.json()["state"]) == (200, "serving")
        await until_taking(world, {0, 2})
        answer = await world.admin("POST", "/v1/lanes/1/remove")
        assert (answer.status_code, [lane["lane"] for lane in answer.json()["lanes"]]) == (
            200,
            [0, 2],
        )
        records = await world.records(topics.REQUESTED_LANES)
        assert [(each.change, each.lane) for each in records] == [
            ("add", 2),
            ("drain", 0),
            ("drain", 1),
            ("resume", 0),
            ("remove", 1),
        ]


async def test_a_lane_that_is_added_again_has_its_new_engine_before_that_one_is_heard(model: Path):
    """The newest heartbeat of its number is that of the lane which was removed."""
    async with lanes_of(model, lanes=2) as (world, _):
        await until_taking(world, {0, 1})
        old = (await listed(world))[1]["engine_url"]
        assert (await world.admin("POST", "/v1/lanes/1/remove")).status_code == 200
        again = {"engine_url": "http://new:1", "lane": 1}
        answer = await world.admin("POST", "/v1/lanes", again)
        assert (answer.status_code, answer.json()["engine_url"]) == (200, "http://new:1")
        twice = await world.admin("POST", "/v1/lanes", {"engine_url": "http://new:1", "lane": 2})
        assert (twice.status_code, "lane 1 has the engine" in twice.text) == (409, True)
        free = await world.admin("POST", "/v1/lanes", {"engine_url": old, "lane": 2})
        assert (free.status_code, free.json()["engine_url"]) == (200, old)


async def test_the_list_says_why_a_lane_cannot_serve_until_its_number_has_another_engine(
    model: Path,
):
    async with lanes_of(model, lanes=2) as (world, scripted):
        await until_taking(world, {0, 1})
        scripted[1].is_silent = True
        await scripted[1].report(is_serving=False, detail="http://engine:1 is not healthy: gone")
        await until_taking(world, {0})
        lanes = await listed(world)
        assert (lanes[0]["detail"], lanes[1]["detail"]) == (
            "",
            "http://engine:1 is not healthy: gone",
        )
        assert (await world.admin("POST", "/v1/lanes/1/remove")).status_code == 200
        again = {"engine_url": "http://new:1", "lane": 1}
        assert (await world.admin("POST", "/v1/lanes", again)).json()["detail"] == ""


async def test_a_drained_lane_answers_what_it_has(model: Path):
    is_drained = asyncio.Event()

    async def script(asked: Asked) -> str:
        await is_drained.wait()
        return "late"

    async with lanes_of(model, lanes=2, script=script) as (world, scripted):
        await until_taking(world, {0, 1})
        client = world.client(await world.episode())
        turn = asyncio.ensure_future(client.chat.completions.create(model="m", messages=MESSAGES))
        async with asyncio.timeout(10):
            while not (busy := [lane for lane in scripted if lane.seen]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        answer = await world.admin("POST", f"/v1/lanes/{busy[0].lane}/drain")
        assert answer.status_code == 200, answer.text
        is_drained.set()
        assert (await turn).choices[0].message.content == "late"
        (finished,) = await world.records(topics.FINISHED_COMPLETIONS)
        assert (finished.lane, finished.attempt) == (busy[0].lane, 0)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/lanes/7/drain", None, 404, "the run has no lane '7'; it has 0, 1"),
        ("/v1/lanes/x/remove", None, 404, "the run has no lane 'x'"),
        ("/v1/lanes/0/resume", None, 409, "lane 0 is not drained"),
        ("/v1/lanes/0/drain", None, 409, "lane 0 is the only one that takes requests"),
        ("/v1/lanes/0/remove", None, 409, "lane 0 is the only one that takes requests"),
        ("/v1/lanes", {"lane": 1}, 409, "the run has a lane 1"),
        ("/v1/lanes", {"lane": 3}, 409, "room for lanes 0 to 2 (log.lanes_max=3), got 3"),
        ("/v1/lanes", {"engine_url": "http://engine:0/"}, 409, "lane 0 has the engine at"),
        ("/v1/lanes", {"engine_url": "http://ENGINE:0"}, 409, "lane 0 has the engine at"),
        ("/v1/lanes", {"engine_url": "engine:1"}, 400, "engine_url"),
        ("/v1/lanes", {"engine_url": "http://[::1"}, 400, "engine_url must be an address"),
        ("/v1/lanes", {"engine_url": "http://e:99999"}, 400, "engine_url must be an address"),
        ("/v1/lanes", {"lane": -1}, 400, "lane"),
    ],
)
async def test_bad_input_is_refused_by_name_and_writes_nothing(
    model: Path, path: str, body: Any, status: int, words: str
):
    async with lanes_of(model, lanes=1) as (world, _):
        await until_taking(world, {0})
        answer = await world.admin("POST", path, body)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert words in error["message"]
        assert error["param"] in ("lane", "engine_url")
        assert await world.records(topics.REQUESTED_LANES) == []


async def test_a_wrong_key_is_401(model: Path):
    async with lanes_of(model, lanes=1) as (world, _):
        for method, path in (("GET", "/v1/lanes"), ("POST", "/v1/lanes/0/drain")):
            answer = await world.admin(method, path, key="another-key-of-some-length")
            assert answer.status_code == 401


async def test_no_room_is_refused(model: Path):
    async with lanes_of(model, lanes=1) as (world, _):
        assert (await world.admin("POST", "/v1/lanes", {})).json()["lane"] == 2
        answer = await world.admin("POST", "/v1/lanes", {})
        assert answer.status_code == 409
        assert "3 lanes, as many as log.lanes_max allows" in answer.json()["error"]["message"]


async def test_of_two_changes_that_exclude_each_other_the_first_on_the_log_holds(model: Path):
    """Another gateway drained lane 0 a moment before; this one has not read it yet."""
    async with lanes_of(model, lanes=2) as (world, _):
        await until_taking(world, {0, 1})
        rivals = [world.admin("POST", f"/v1/lanes/{lane}/drain") for lane in (0, 1)]
        answers = await asyncio.gather(*rivals)
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        states = [lane["state"] for lane in (await listed(world)).values()]
        assert sorted(states) == ["drained", "serving"]


async def test_a_gateway_that_starts_again_knows_the_plan(model: Path):
    async with lanes_of(model, lanes=2) as (world, _):
        await until_taking(world, {0, 1})
        assert (await world.admin("POST", "/v1/lanes/1/drain")).status_code == 200
        await world.kill()
        await world.write(
            topics.REQUESTED_LANES,
            0,
            RequestedLane(lane=2, change="add", change_id="1" * 32, requested_ms=0),
        )
        await world.start_another()
        states = {number: lane["state"] for number, lane in (await listed(world)).items()}
        assert states == {0: "serving", 1: "drained", 2: "serving"}
        await until_taking(world, {0})
