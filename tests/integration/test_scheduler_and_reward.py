"""Scheduler and reward as processes on the real broker, killed in the middle of their work."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from forgemq_contracts import topics
from tests.integration.scored_run import Run, scored_run

GROUPS = ("g-0", "g-1", "g-2", "g-3")


@pytest.fixture
async def run(
    new_run_id: Callable[[], str], kafka_bootstrap: str, tmp_path: Path
) -> AsyncIterator[Run]:
    async with scored_run(new_run_id(), kafka_bootstrap, tmp_path) as opened:
        yield opened


@pytest.mark.integration
@pytest.mark.timeout(180)
async def test_killed_services_go_on_where_they_were_and_nothing_happens_twice(run: Run) -> None:
    await run.start("scheduler", "reward")
    await run.heartbeat(version=0)
    for group in GROUPS:
        await run.request(group)
    admitted = await run.records(topics.ADMITTED_GROUPS, count=2)
    assert [(group.group_id, group.queue_index) for group in admitted] == [("g-0", 0), ("g-1", 1)]

    await run.play("g-8", 0)
    await run.play("g-8", 1)
    await run.play("g-9", 0)
    await run.merge("g-1")
    await run.records(topics.SCORED_GROUPS, count=1)
    await run.records(topics.SCHEDULED_STEPS, count=1)
    await run.kill("scheduler", "reward")

    await run.merge("g-0")
    await run.train(0, ("g-1",))
    await run.play("g-9", 1)
    await run.heartbeat(version=1)
    await run.start("scheduler", "reward")
    scored = await run.records(topics.SCORED_GROUPS, count=2)
    assert {group.group_id: group.not_trainable for group in scored} == {"g-8": "", "g-9": ""}
    assert [[c.advantage for c in group.completions] for group in scored] == [[-0.5, 0.5]] * 2
    steps = await run.records(topics.SCHEDULED_STEPS, count=2)
    assert [step.groups[0].group_id for step in steps] == ["g-1", "g-0"]
    retired = await run.records(topics.RETIRED_GROUPS, count=1)
    assert [(group.group_id, group.reason, group.step) for group in retired] == [
        ("g-1", "trained", 0)
    ]
    admitted = await run.records(topics.ADMITTED_GROUPS, count=3)
    assert [group.group_id for group in admitted] == ["g-0", "g-1", "g-2"]
    grades = await run.records(topics.GRADED_EPISODES, count=4)
    assert sorted(grade.episode_id for grade in grades) == [
        f"{group}.{index}.0" for group in ("g-8", "g-9") for index in (0, 1)
    ]
    assert await run.stop() == [0, 0]
