"""What a gateway tells of a curriculum: all results by index, also after a restart."""

from pathlib import Path

import msgspec

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.curriculum import Curriculum, TaskResult
from forgemq_contracts.groups import RetiredGroup
from forgemq_contracts.partitions import group_partition
from forgemq_gateway.core.task_results import TaskResults
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import GROUP_PARTITIONS, World, configuration_of, running


def result_of(index: int) -> TaskResult:
    return TaskResult(
        index=index, number=index + 1, task_number=10 + index, version=2, scored=8, solved=index
    )


async def retire(world: World, index: int) -> None:
    group_id = f"g-{index}"
    await world.write(
        topics.RETIRED_GROUPS,
        group_partition(group_id, partitions=GROUP_PARTITIONS),
        RetiredGroup(
            group_id=group_id,
            domain="shop",
            purpose="train",
            reason="zero_variance",
            result=result_of(index),
        ),
    )


async def told(world: World, *, after: int = 0) -> list[TaskResult]:
    answer = await world.admin("GET", f"/v1/domains/shop/results?after={after}")
    return msgspec.convert(answer.json()["results"], list[TaskResult])


async def test_results_are_told_by_index_without_gaps_and_again_after_a_restart(model: Path):
    run = configuration_of(model)
    curriculum = Curriculum(sampler="age", tasks=20)
    queue = msgspec.structs.replace(run.queues[0], curriculum=curriculum)
    configuration = msgspec.structs.replace(run, queues=(queue,))
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, lambda _: "x") as (world, _):
        for index in (1, 0, 3):
            await retire(world, index)
        group_id = (
            await world.admin(
                "POST",
                "/v1/groups",
                {"domain": "shop", "idempotency_key": "shop/0", "task": 1, "task_number": 7},
            )
        ).json()["group_id"]
        assert await told(world) == [result_of(0), result_of(1)]
        await world.stop()
        await world.start_another()
        assert await told(world) == [result_of(0), result_of(1)]
        await retire(world, 2)
        for _ in range(100):
            if len(await told(world)) == 4:
                break
        assert await told(world, after=2) == [result_of(2), result_of(3)]
        status = await world.admin("GET", f"/v1/groups/{group_id}")
        unknown = await world.admin("GET", "/v1/domains/other/results")
        (requested,) = await world.records(topics.REQUESTED_GROUPS)
    assert status.json()["task_number"] == requested.task_number == 7
    assert unknown.status_code == 404


async def test_a_task_number_needs_a_training_group_of_its_own_number(model: Path):
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "x") as (world, _):
        messages = []
        for fields in ({"purpose": "eval", "idempotency_key": "shop/0"}, {"idempotency_key": "k"}):
            body = {"domain": "shop", "task": 1, "task_number": 7, **fields}
            answer = await world.admin("POST", "/v1/groups", body)
            messages.append((answer.status_code, answer.json()["error"]["message"]))
    assert messages[0][0] == messages[1][0] == 400
    assert "task_number: must be null for evaluation" in messages[0][1]
    assert "task_number: needs the key 'shop/<n>', got 'k'" in messages[1][1]


def test_a_result_that_is_known_changes_nothing():
    results = TaskResults()
    for index in (2, 0, 0, 1, 2):
        results.add(result_of(index))
    assert list(results.after(0, count_max=2)) == [result_of(0), result_of(1)]
    assert list(results.after(2, count_max=2)) == [result_of(2)]
    assert list(results.after(9, count_max=2)) == []
