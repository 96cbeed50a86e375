"""A group past its deadline, through gateway, reward, merger and scheduler over one log."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import forgemq_merger.app
import forgemq_reward.app
import forgemq_scheduler.app
from forgemq_audit.run_report import audit_run
from forgemq_bus.blobs import BlobStore
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration, StartedRun, Trainer
from forgemq_contracts.steps import TrainedStep
from forgemq_shell.service import Context
from forgemq_telemetry import Telemetry
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import World, configuration_of, running
from tests.unit.scheduler.scene import METRICS

MAINS = {
    "merger": forgemq_merger.app.main,
    "reward": forgemq_reward.app.main,
    "scheduler": forgemq_scheduler.app.main,
}
DEADLINE_S = 30.0
BODY = {"domain": "shop", "idempotency_key": "k", "task": {}, "group_size": 4}


def run_of(model: Path) -> StartedRun:
    configuration = configuration_of(model)
    queue = msgspec.structs.replace(configuration.queues[0], group_deadline_s=DEADLINE_S)
    configuration = msgspec.structs.replace(
        configuration, queues=(queue,), trainer=Trainer(steps=1)
    )
    return StartedRun(run="r", configuration=configuration, blobs="memory://r", started_ms=0)


async def create_topics_beside(log: MemoryLog, configuration: RunConfiguration) -> None:
    """Those for dead letters and of all runs; the world creates the run's own."""
    dead = {one.dlq_name: 1 for one in topics.OF_RUN if one.has_dlq}
    await log.create_topics(dead | {one.name: 1 for one in topics.SHARED})


@asynccontextmanager
async def services(log: MemoryLog, started: StartedRun) -> AsyncIterator[None]:
    """Reward, merger and scheduler, each on its own handle of the log, as processes are."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for name, main in MAINS.items():
            context = Context(
                started=started,
                log=log.open(),
                blobs=BlobStore("memory://r", run="r"),
                telemetry=Telemetry(service=name),
                stop=stop,
                environ={},
            )
            tasks.create_task(main(context))
        yield
        stop.set()


async def play(world: World, claim: Any, *, reward: float) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    await world.client(claim).chat.completions.create(model="m", messages=messages)
    path = f"/v1/episodes/{claim['episode_id']}"
    body = {"reward_id": "r", "name": "outcome", "value": reward}
    assert (await world.admin("POST", f"{path}/rewards", body)).status_code == 200
    assert (await world.admin("POST", f"{path}/finish", {})).status_code == 200


async def train(world: World) -> None:
    """Train the first step, as a trainer would."""
    (scheduled,) = await world.eventually(topics.SCHEDULED_STEPS, 1)
    step = TrainedStep(
        step=0,
        lineage=1,
        group_ids=tuple(group.group_id for group in scheduled.groups),
        failed_group_ids=(),
        metrics=METRICS,
        checkpoint_step=0,
        duration_s=0.0,
        is_last=True,
    )
    await world.write(topics.TRAINED_STEPS, 0, step)


@pytest.mark.slow
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_group_past_its_deadline_counts_each_of_its_episodes_once(
    model: Path, is_restarted: bool
) -> None:
    """Two of four episodes are finished, one is held, one unclaimed; or all services restart."""
    log, started = MemoryLog(run="r", clock_ms=wall_ms), run_of(model)
    await create_topics_beside(log, started.configuration)
    async with running(log.open, started.configuration, lambda _: "yes") as (world, _):
        async with services(log, started):
            group = (await world.admin("POST", "/v1/groups", BODY)).json()["group_id"]
            won, lost, _ = [await world.claim(group) for _ in range(3)]
            await play(world, won, reward=1.0)
            await play(world, lost, reward=0.0)
            await asyncio.sleep(DEADLINE_S)
            await world.eventually(topics.CLOSED_GROUPS, 1)
            if is_restarted:
                await world.kill()
        if is_restarted:
            await world.start_another()
        async with services(log, started):
            await train(world)
            await world.eventually(topics.RETIRED_GROUPS, 1)
        made, _ = await audit_run(log, started, reason="completed", now_ms=0)
        ends = await world.records(topics.FINISHED_EPISODES)
        graded = await world.records(topics.GRADED_EPISODES)
        (scored,) = await world.records(topics.SCORED_GROUPS)
        (merged,) = await world.records(topics.MERGED_GROUPS)
        (retired,) = await world.records(topics.RETIRED_GROUPS)
        closed = await world.records(topics.CLOSED_GROUPS)
    ids = [f"{group}.{index}.0" for index in range(4)]
    statuses = ["completed", "completed", "failed", "failed"]
    assert sorted((end.episode_id, end.status) for end in ends) == list(
        zip(ids, statuses, strict=True)
    )
    assert sorted(grade.episode_id for grade in graded) == ids[:2]
    assert [one.group_id for one in closed] == [group]
    assert [(one.episode_id, one.is_masked) for one in scored.episodes] == list(
        zip(ids, [False, False, True, True], strict=True)
    )
    assert [one.advantage for one in scored.completions] == [0.5, -0.5]
    assert (merged.not_trainable, retired.reason, retired.step) == ("", "trained", 0)
    assert {name: holds for name, holds in made.guarantees.items() if name in ("G1", "G2")} == {
        "G1": True,
        "G2": True,
    }
