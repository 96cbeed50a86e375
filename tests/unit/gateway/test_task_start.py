"""A request that comes at the moment when an error ends the gateway."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_gateway.app import new_context
from forgemq_gateway.core.attempts import Attempts
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.turns import OpenTurn
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.task_start import start_task
from forgemq_telemetry.telemetry import Telemetry
from tests.simulation.attempts_records import opened_episode, prepared_turn
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.test_core import report
from tests.unit.gateway.world import SETTINGS, configuration_of, partitions_of

Ask: TypeAlias = Callable[[], object]


async def answer() -> str:
    return "answered"


async def end() -> None:
    raise OSError("the log is gone")


async def refusal_at_the_end(
    prepare: Callable[[asyncio.TaskGroup], Awaitable[Ask]],
) -> RefusedError:
    """The refusal of a request that asks when an error has ended the gateway's group."""
    refusals: list[RefusedError] = []
    is_waiting = asyncio.Event()

    async def request(tasks: asyncio.TaskGroup) -> None:
        ask = await prepare(tasks)
        is_waiting.set()
        try:
            await asyncio.sleep(3600)
        finally:  # The group is cancelled, and this request has not ended yet.
            with pytest.raises(RefusedError) as refused:
                ask()
            refusals.append(refused.value)

    async def serve() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(request(tasks))
            await is_waiting.wait()
            tasks.create_task(end())

    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(serve(), 5)
    assert [type(error) for error in ended.value.exceptions] == [OSError]
    (refusal,) = refusals
    return refusal


async def test_what_is_started_runs_in_the_gateways_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        task = start_task(tasks, answer())
    assert task.result() == "answered"


async def test_a_request_at_the_moment_of_the_end_is_a_503_that_may_be_asked_again() -> None:
    async def prepare(tasks: asyncio.TaskGroup) -> Ask:
        return lambda: start_task(tasks, answer())

    refusal = await refusal_at_the_end(prepare)
    assert (refusal.status, refusal.retry_after_s) == (503, 1)


async def test_so_is_one_that_goes_on_with_a_turn_whose_client_had_left(model: Path) -> None:
    async def prepare(tasks: asyncio.TaskGroup) -> Ask:
        dispatcher, episode, turn = await left_turn(model, tasks)
        return lambda: dispatcher.join(episode, turn, deadline_ms=turn.deadline_ms)

    refusal = await refusal_at_the_end(prepare)
    assert (refusal.status, refusal.retry_after_s) == (503, 1)


async def left_turn(
    model: Path, tasks: asyncio.TaskGroup
) -> tuple[Dispatcher, HeldEpisode, OpenTurn]:
    """A turn that a lane has had and that nobody waits for."""
    configuration = configuration_of(model)
    log = MemoryLog(run="r", clock_ms=wall_ms).open()
    await log.create_topics(partitions_of(configuration))
    context = await new_context(
        log,
        configuration=configuration,
        settings=SETTINGS,
        telemetry=Telemetry(service="gateway"),
        tasks=tasks,
        gateway="http://here#1",
        peer_url="http://here",
    )
    attempts = Attempts(Lanes(), lane_hold_s=1.0)
    attempts.restore_lane(report(0), heard_s=context.clock.now_s())
    dispatcher = Dispatcher(attempts, context=context)
    episode = HeldEpisode(opened_episode("g-1"), lease_until_s=0.0)
    turn = episode.begin(
        "body", matched=None, requested_ms=wall_ms(), deadline_ms=wall_ms() + 60_000
    )
    dispatcher.begin(episode, turn)
    await dispatcher.dispatch(episode, turn, prepared_turn(turn, parent=None), trace=())
    await dispatcher.leave(episode, [turn])
    assert (turn.sent, turn.lane, turn.waiting) == (1, -1, 0)
    return dispatcher, episode, turn
