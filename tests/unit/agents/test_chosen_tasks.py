"""Which tasks a run asks for: as hard as their stage, and as a curriculum chooses."""

import asyncio
from contextlib import suppress

import msgspec
import pytest
from msgspec import Raw

from forgemq_agents.core.known_tasks import KnownTasks
from forgemq_agents.core.samplers import READY
from forgemq_agents.task_size import TASK_BYTES_MAX
from forgemq_agents.user_code import UserCodeError
from forgemq_contracts.admin import GroupRequest
from forgemq_contracts.curriculum import TaskResult
from forgemq_contracts.stages import Stage, StageDomain
from forgemq_telemetry.causes import causes
from tests.memory_gateway import MemoryGateway
from tests.unit.agents.agent_run import CURRICULUM, POOL, numbered, play, task_of, well


def stage_of(from_step: int, difficulty: float | None) -> Stage:
    own = StageDomain(domain="count", share=1.0, difficulty=difficulty)
    return Stage(from_step=from_step, domains=(own,))


STAGES = (stage_of(0, None), stage_of(2, 0.25), stage_of(3, 0.75))


async def test_a_task_is_as_hard_as_the_step_that_is_to_train_it(memory_gateway):
    """One group a step: groups 0 and 1 train before step 2, group 2 in step 2, the others after."""
    gateway = await memory_gateway(slots=2)

    async def slowly(episode) -> None:
        await asyncio.sleep(0.3)

    await play(gateway, slowly, stages=STAGES)
    trained = [g for g in gateway.in_order() if g.request.purpose == "train"]
    assert [g.request.stage for g in trained[:5]] == [0, 0, 1, 2, 2]
    assert [task_of(g).get("difficulty") for g in trained[:5]] == [None, None, 0.25, 0.75, 0.75]
    evaluated = [g for g in gateway.in_order() if g.request.purpose == "eval"]
    assert {g.request.stage for g in evaluated} == {None}
    assert all("difficulty" not in task_of(g) for g in evaluated)


async def test_a_group_that_waits_for_its_slot_keeps_the_stage_it_was_asked_for(memory_gateway):
    """Agents that start again later ask with another stage, and play what is on the log."""
    gateway = await memory_gateway(slots=1, groups_to_train=4)
    early = msgspec.json.encode(numbered(3, "count", 0, difficulty=0.5))
    request = GroupRequest(domain="count", idempotency_key="count/0", task=Raw(early), stage=0)
    await gateway.request_group(request)
    gateway.train(3, is_last=False)
    await play(gateway, well, slots=1, stages=STAGES)
    first = gateway.in_order()[0].request
    assert (first.stage, msgspec.json.decode(first.task)["difficulty"]) == (0, 0.5)


async def solves_even_tasks_half_of_the_time(episode) -> None:
    index = int(episode.episode_id.split(".")[1])
    episode.result = {"solved": episode.task["k"] % 2 == 0 and index % 2 == 0}
    await asyncio.sleep(0.02)


def chosen_again(gateway: MemoryGateway) -> list[int]:
    """The choices of a run, made again from what its requests and results say."""
    groups = [g.request for g in gateway.in_order() if g.request.purpose == "train"]
    again = []
    for number, request in enumerate(groups):
        tasks = KnownTasks(POOL, versions=CURRICULUM.versions)
        for earlier, before in enumerate(groups[:number]):
            tasks.ask(earlier, before.task_number)
        tasks.learn(gateway.results[: request.results_known])
        key = f"3/count/{number}"
        again.append(READY["success_band"](tasks, key=key, curriculum=CURRICULUM))
    return again


async def test_a_curriculum_asks_for_what_teaches_and_the_log_has_each_choice(memory_gateway):
    """Even tasks of the pool are solved by half of the episodes, odd ones by none."""
    gateway = await memory_gateway(slots=2, groups_to_train=40, steps=50)
    await play(gateway, solves_even_tasks_half_of_the_time, curriculum=CURRICULUM)
    trained = [g for g in gateway.in_order() if g.request.purpose == "train"]
    numbers = [g.request.task_number for g in trained]
    assert [task_of(g)["k"] for g in trained] == numbers
    assert numbers == chosen_again(gateway)
    late = numbers[15:40]
    assert sum(number % 2 == 0 for number in late) / len(late) > 0.7
    evaluated = [g for g in gateway.in_order() if g.request.purpose == "eval"]
    assert {g.request.task_number for g in evaluated} == {None}


async def test_agents_that_start_again_choose_from_all_results_and_keep_what_was_chosen(
    memory_gateway,
):
    gateway = await memory_gateway(slots=2, groups_to_train=12, steps=50)

    async def until_the_sixth(episode) -> None:
        await solves_even_tasks_half_of_the_time(episode)
        if len(gateway.results) >= 6:
            await asyncio.Event().wait()

    with suppress(TimeoutError):
        async with asyncio.timeout(2):
            await play(gateway, until_the_sixth, curriculum=CURRICULUM)
    before = [g.request for g in gateway.in_order() if g.request.purpose == "train"]
    assert 6 <= len(before) < 12
    await play(gateway, solves_even_tasks_half_of_the_time, curriculum=CURRICULUM)
    trained = [g.request for g in gateway.in_order() if g.request.purpose == "train"]
    assert trained[: len(before)] == before
    assert [request.task_number for request in trained] == chosen_again(gateway)


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_pool_that_has_lost_tasks_of_the_run_ends_the_process_by_domain_and_task(
    memory_gateway, is_over
):
    gateway = await memory_gateway(slots=2, groups_to_train=6, steps=50)
    if is_over:
        result = TaskResult(index=0, number=0, task_number=4, version=0, scored=2, solved=1)
        gateway.results.append(result)
    else:
        task = Raw(msgspec.json.encode(numbered(3, "count", 4)))
        await gateway.request_group(
            GroupRequest(domain="count", idempotency_key="count/0", task=task, task_number=4)
        )
    with pytest.raises(ExceptionGroup) as raised:
        await play(gateway, well, curriculum=CURRICULUM, pool=4)
    [error] = [each for each in causes(raised.value) if isinstance(each, UserCodeError)]
    assert str(error) == (
        "queues.count.curriculum: its pool has 4 tasks, and the run has asked for task 4, counted "
        "from 0: continue it with the tasks that it began with"
    )


def nested(depth: int) -> list[object]:
    made: list[object] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (object(), "has no form in JSON: Encoding objects of type object is unsupported"),
        ("\ud800", "has no form in JSON: 'utf-8' codec can't encode character"),
        (nested(100_000), "has no form in JSON: maximum recursion depth exceeded"),
        ("x" * TASK_BYTES_MAX, f"has {TASK_BYTES_MAX + 2} bytes, a task has at most "),
    ],
    ids=["no JSON", "half a character", "too deep", "too long"],
)
async def test_a_task_that_no_request_can_carry_ends_the_process_by_its_domain_and_number(
    memory_gateway, task, said
):
    gateway = await memory_gateway()

    def source(seed: int, domain: str, k: int) -> object:
        return task if k == 1 else numbered(seed, domain, k)

    with pytest.raises(ExceptionGroup) as raised:
        await play(gateway, well, source=source)
    [error] = [each for each in causes(raised.value) if isinstance(each, UserCodeError)]
    assert str(error).startswith(f"queues.count: task 1 {said}")
    assert 1 not in {task_of(group)["k"] for group in gateway.in_order()}
