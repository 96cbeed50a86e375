"""Async reward functions: many gradings at once in one process, and what a lost process costs."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_contracts.episodes import GradedEpisode
from forgemq_contracts.run import Queue
from tests.unit.reward.test_service import PARTITION, Desk, configuration_of

CODE = """
import asyncio, os, pathlib, time

HERE = pathlib.Path(__file__).parent
alive = set()

async def outcome(episode):
    task = episode.task
    with (HERE / "begun.txt").open("a") as file:
        print(episode.episode_id, os.getpid(), file=file)
    match task["do"]:
        case "sleep":
            await asyncio.sleep(task["s"])
        case "wait":
            while not (HERE / "go").exists():
                await asyncio.sleep(0.02)
        case "die":
            while len((HERE / "begun.txt").read_text().split()) < 2 * task["after"]:
                await asyncio.sleep(0.02)
            os._exit(3)
        case "cancel":
            raise asyncio.CancelledError
        case "hold on":
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass
        case "block":
            time.sleep(60)
    return task["reward"]

def plain(episode):
    return 2.0

async def ones(episode):
    return [1.0 for _ in episode.completions]
"""


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    run = configuration_of(tmp_path, outcome="async_rewards:outcome", process="async_rewards:ones")
    plain = Queue(domain="plain", task_source="", agent="", outcome="async_rewards:plain")
    desk = Desk(msgspec.structs.replace(run, queues=(*run.queues, plain)), tmp_path)
    (tmp_path / "async_rewards.py").write_text(CODE)
    await desk.open()
    yield desk
    await desk.log.close()


async def play(desk: Desk, index: int, do: str, *, group: str = "g-1", **task) -> None:
    fields = {"do": do, "reward": 1.0, **task}
    await desk.play(index, [[5]], group=group, size=400, task=msgspec.json.encode(fields))


async def begun(desk: Desk, count: int) -> list[str]:
    """Wait until so many gradings began; returns their episodes and processes by turns."""
    path = desk.folder / "begun.txt"
    async with asyncio.timeout(30):
        while not path.exists() or len(path.read_text().splitlines()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return path.read_text().split()


def by_episode(grades: list[GradedEpisode]) -> dict[str, GradedEpisode]:
    found = {grade.episode_id: grade for grade in grades}
    assert len(found) == len(grades), "an episode has two grades"
    return found


async def grades_so_far(desk: Desk) -> int:
    place = Place(topics.GRADED_EPISODES.name, PARTITION)
    return (await desk.log.end_positions([place]))[place]


@pytest.mark.slow
async def test_200_gradings_wait_in_one_process_and_hold_up_no_other_queue_or_episode(desk):
    """The 200 return only after the fast ones, which were played last, have their grades."""
    async with desk.service():
        for index in range(200):
            await play(desk, index, "wait", reward=float(index))
        processes = await begun(desk, 200)
        await play(desk, 200, "sleep", s=0)
        await desk.play(0, [[5]], group="g-2", domain="plain")
        first = by_episode(await desk.records(topics.GRADED_EPISODES, count=2))
        assert {id: one.outcome for id, one in first.items()} == {"g-1.200.0": 1.0, "g-2.0.0": 2.0}
        (desk.folder / "go").touch()
        grades = by_episode(await desk.records(topics.GRADED_EPISODES, count=202))
    assert len(set(processes[1::2])) == 1
    assert [grades[f"g-1.{index}.0"].outcome for index in range(200)] == list(range(200))
    assert {one.process[0].value for one in grades.values() if one.process} == {1.0}
    assert await grades_so_far(desk) == 202


@pytest.mark.slow
async def test_200_graders_of_10_s_take_the_time_of_one_and_a_fast_one_takes_none_of_it(desk):
    async with desk.service():
        began_s = time.monotonic()
        for index in range(200):
            await play(desk, index, "sleep", s=10)
        await begun(desk, 200)
        asked_s = time.monotonic()
        await play(desk, 200, "sleep", s=0)
        (fast,) = await desk.records(topics.GRADED_EPISODES, count=1)
        fast_s = time.monotonic() - asked_s
        await desk.records(topics.GRADED_EPISODES, count=201)
        all_s = time.monotonic() - began_s
    assert fast.episode_id == "g-1.200.0"
    assert fast_s < 3
    assert 10 <= all_s < 20


@pytest.mark.slow
async def test_no_more_gradings_are_under_way_than_the_setting_allows(desk):
    async with desk.service(FORGEMQ_REWARD_GRADINGS_MAX="3"):
        for index in range(5):
            await play(desk, index, "wait")
        await begun(desk, 3)
        await play(desk, 0, "sleep", s=0, group="g-2")
        await desk.play(0, [[5]], group="g-3", domain="plain")
        (plain,) = await desk.records(topics.GRADED_EPISODES, count=1)
        assert plain.episode_id == "g-3.0.0"
        assert len(await begun(desk, 3)) == 2 * 3
        (desk.folder / "go").touch()
        by_episode(await desk.records(topics.GRADED_EPISODES, count=7))


@pytest.mark.slow
async def test_a_process_that_is_killed_costs_its_gradings_a_try_and_no_grade(desk):
    async with desk.service():
        for index in range(20):
            await play(desk, index, "wait", reward=float(index))
        os.kill(int((await begun(desk, 20))[1]), signal.SIGKILL)
        processes = (await begun(desk, 40))[1::2]
        (desk.folder / "go").touch()
        grades = by_episode(await desk.records(topics.GRADED_EPISODES, count=20))
    assert len(set(processes)) == 2
    assert [grades[f"g-1.{index}.0"].outcome for index in range(20)] == list(range(20))


@pytest.mark.slow
async def test_an_episode_that_ends_its_process_is_masked_and_those_beside_it_are_graded(desk):
    async with desk.service():
        await play(desk, 0, "die", after=4)
        for index in (1, 2, 3):
            await play(desk, index, "wait", reward=float(index))
        await begun(desk, 5)
        (desk.folder / "go").touch()
        grades = by_episode(await desk.records(topics.GRADED_EPISODES, count=4))
        tries = (await begun(desk, 4))[::2].count("g-1.0.0")
    assert grades["g-1.0.0"].is_masked
    assert grades["g-1.0.0"].detail == "the grader process ended with status 3"
    assert [grades[f"g-1.{index}.0"].outcome for index in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert not any(grades[f"g-1.{index}.0"].is_masked for index in (1, 2, 3))
    assert tries == 3


@pytest.mark.parametrize(
    ("do", "tries", "detail"),
    [
        ("sleep", 3, "the graders took more than 0.3 s"),
        ("cancel", 3, "the grading was cancelled"),
        ("hold on", 1, "the graders took more than 0.3 s"),
        ("block", 2, "the graders took more than 0.3 s"),
    ],
)
@pytest.mark.slow
async def test_a_grading_that_does_not_end_well_is_masked_and_the_next_is_graded(
    desk, do, tries, detail
):
    rewards = msgspec.structs.replace(desk.configuration.rewards, grader_timeout_s=0.3)
    desk.configuration = msgspec.structs.replace(desk.configuration, rewards=rewards)
    async with desk.service(FORGEMQ_REWARD_GRADING_TRIES_MAX=str(tries)):
        await play(desk, 0, do, s=60)
        (masked,) = await desk.records(topics.GRADED_EPISODES, count=1)
        await play(desk, 1, "sleep", s=0)
        (_, graded) = await desk.records(topics.GRADED_EPISODES, count=2)
    assert (masked.is_masked, masked.detail) == (True, detail)
    assert (graded.is_masked, graded.outcome) == (False, 1.0)


@pytest.mark.slow
async def test_the_service_ends_with_gradings_under_way_and_the_next_life_grades_them(desk):
    async with desk.service():
        await play(desk, 0, "wait")
        child = psutil.Process(int((await begun(desk, 1))[1]))
    assert not child.is_running()
    (desk.folder / "go").touch()
    async with desk.service():
        (grade,) = await desk.records(topics.GRADED_EPISODES, count=1)
    assert (grade.is_masked, grade.outcome) == (False, 1.0)
    assert await grades_so_far(desk) == 1
