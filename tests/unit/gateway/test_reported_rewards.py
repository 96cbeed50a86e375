"""Which values of a reward the gateway takes."""

from pathlib import Path
from typing import Any

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.talk import talk
from tests.unit.gateway.world import configuration_of, running

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(("value", "sign"), [(1e308, "<="), (1.1e12, "<="), (-1e39, ">=")])
async def test_a_reward_out_of_bounds_is_refused(model: Path, value: float, sign: str) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}/rewards"
        answer = await world.admin("POST", path, {"reward_id": "r", "name": "n", "value": value})
        largest = await world.admin("POST", path, {"reward_id": "s", "name": "n", "value": 1e12})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "value"
    assert f"{sign} {'-' * (value < 0)}1000000000000.0" in error["message"]
    assert largest.status_code == 200


async def test_each_reward_is_written_once_and_all_of_them_outlive_a_restart(model: Path) -> None:
    """A record with all rewards so far would make an episode's records quadratic in them."""
    count = 40
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}"
        for number in range(count):
            if number == count // 2:
                await world.restart()
            reward = {"reward_id": f"r{number}", "name": "n", "value": number}
            for _ in range(2):
                answer = await world.admin("POST", f"{path}/rewards", reward)
                assert answer.status_code == 200
        opened = await world.eventually(topics.OPENED_EPISODES, 1 + count)
        await world.admin("POST", f"{path}/finish", {"result": {}})
        [finished] = await world.eventually(topics.FINISHED_EPISODES, 1)
    assert [record.rewards_before for record in opened] == [0, *range(count)]
    assert max(len(record.rewards) for record in opened) == 1
    assert [reward.value for reward in finished.rewards] == list(range(count))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
async def test_a_reward_names_a_turn_by_the_header_of_its_answer(
    model: Path, path: str, body: Any
) -> None:
    async with talk(model, lambda _: "yes") as agent:
        answer = await agent.post(path, {**body, "stream": True})
        rewards = f"/v1/episodes/{agent.episode_id}/rewards"
        reward = {"name": "n", "value": 1, "completion_id": answer.headers["x-request-id"]}
        taken = await agent.world.admin("POST", rewards, {"reward_id": "r", **reward})
        (finished,) = await agent.finished()
        ended = await agent.end()
    assert taken.status_code == 200, taken.text
    assert [each.completion_id for each in ended.rewards] == [finished.request_id]
