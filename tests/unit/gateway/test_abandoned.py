"""Episodes whose agents are gone end once; those whose agents could not be heard do not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forgemq_bus.errors import LogError, LogUnavailableError
from forgemq_bus.log import Emit, Log
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.admin import AbortRequest, FinishRequest, RewardRequest
from forgemq_contracts.groups import ClosedGroup, RetiredGroup
from forgemq_contracts.ownership import OwnedRun, PartitionOwner
from forgemq_gateway.abandoned import Abandoned
from forgemq_gateway.access import Access
from forgemq_gateway.change_signal import ChangeSignal
from forgemq_gateway.clock import Clock
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.attempts import Attempts
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.gateways import Gateways
from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.fenced_writer import FencedWriter
from forgemq_gateway.lane_changes import LaneChanges
from forgemq_gateway.operations import Operations
from forgemq_gateway.outbox import Outbox
from forgemq_gateway.ownership import ReadBack
from forgemq_gateway.settings import GatewaySettings
from forgemq_gateway.standstill import Standstill
from forgemq_gateway.ticks import STALL_S, TICK_S, keep_ticking
from forgemq_shell.dead_letters import DeadLetters
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, wall_ms
from tests.unit.gateway.test_held_and_leased import admitted, opened
from tests.unit.gateway.world import ADMIN_KEY, configuration_of, partitions_of

LAST = 1  # of the two attempts of `configuration_of`
END = topics.FINISHED_EPISODES


@dataclass(frozen=True, slots=True)
class SetClock(Clock):
    """A clock that stands where the test has set it."""

    at_s: list[float]

    def now_s(self) -> float:
        return self.at_s[0]


class Scene:
    """A gateway's parts without HTTP; `pass_end` lets the write of an end go on, or fail."""

    def __init__(self, context: GatewayContext, clock: SetClock, log: Log) -> None:
        self.context, self.clock, self.log = context, clock, log
        keys = AdminKeys((ADMIN_KEY,), run="r")
        access = Access(keys=keys, registry=context.registry, gateways=context.gateways)
        attempts = Attempts(Lanes(), lane_hold_s=1.0)
        self.dispatcher = Dispatcher(attempts, context=context)
        self.operations = Operations(
            access=access, keys=keys, dispatcher=self.dispatcher, context=context
        )
        self.abandoned = Abandoned(self.operations, context=context)
        self.ends: list[Any] = []
        self.before_end: Callable[[], Awaitable[None]] | None = None
        self.after_end: Callable[[], Awaitable[None]] | None = None

    def episode(self, group: int, *, attempt: int = LAST) -> HeldEpisode:
        self.context.registry.apply_admitted_group(admitted(group))
        held = self.context.registry.apply_opened_episode(
            opened(group, 0, attempt=attempt), lease_until_s=self.clock.at_s[0] + 10.0
        )
        assert held is not None
        return held


class SceneWriter:
    """Commits to the log; an end may wait before it, or have its answer lost after it."""

    def __init__(self, writer: Any, scene: Scene) -> None:
        self.writer, self.scene = writer, scene

    async def commit(self, *, outputs: Sequence[Emit], **rest: Any) -> None:
        ends = [emit for emit in outputs if emit.topic == END.name]
        if ends and self.scene.before_end is not None:
            await self.scene.before_end()
        await self.writer.commit(outputs=outputs, **rest)
        self.scene.ends += [topics.decode(END, emit.value) for emit in ends]
        if ends and self.scene.after_end is not None:
            await self.scene.after_end()

    async def close(self) -> None:
        await self.writer.close()


class SceneLog:
    """A log with such writers."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.scene: Any = None

    async def transaction_writer(self, transactional_id: str) -> SceneWriter:
        return SceneWriter(await self.log.transaction_writer(transactional_id), self.scene)


def owner_of_all() -> Gateways:
    """A gateway that serves every partition."""
    gateways = Gateways("http://here#1", url="http://here", partitions=GROUP_PARTITIONS)
    numbers = tuple(range(GROUP_PARTITIONS))
    owner = PartitionOwner(gateway="http://here#1", url="http://here", partitions=numbers)
    gateways.take_owners(OwnedRun(run="r", owner=1, owned_ms=1, owners=(owner,)))
    gateways.serving |= set(numbers)
    return gateways


@asynccontextmanager
async def scene_of(model: Path) -> AsyncIterator[Scene]:
    configuration = configuration_of(model)
    log = MemoryLog(run="r", clock_ms=wall_ms).open()
    await log.create_topics(partitions_of(configuration))
    writer, telemetry = await log.writer(), Telemetry(service="gateway")
    dead_letters = DeadLetters(log, writer, service="gateway", telemetry=telemetry)
    gateways, read_back = owner_of_all(), ReadBack(log, wait_s=0.05)
    clock = SetClock([100.0])
    scene_log: Any = SceneLog(log)
    async with asyncio.TaskGroup() as tasks:
        fenced = FencedWriter(scene_log, gateways=gateways, read_back=read_back, tasks=tasks)
        context = GatewayContext(
            configuration=configuration,
            settings=GatewaySettings(admin_key=ADMIN_KEY),
            registry=Registry(),
            gateways=gateways,
            read_back=read_back,
            standstill=Standstill(read_back=read_back, clock=clock),
            outbox=Outbox(
                writer,
                configuration=configuration,
                dead_letters=dead_letters,
                fenced=fenced,
                read_back=read_back,
            ),
            fenced=fenced,
            lane_changes=LaneChanges(configuration.log, telemetry=telemetry),
            clock=clock,
            changed=ChangeSignal(),
            tasks=tasks,
            telemetry=telemetry,
        )
        scene = scene_log.scene = Scene(context, clock, log)
        yield scene
    await log.close()


async def test_an_agent_that_is_heard_of_while_another_end_is_written_keeps_its_episode(
    model: Path,
) -> None:
    async with scene_of(model) as scene:
        gone, heard = scene.episode(0), scene.episode(1)
        scene.clock.at_s[0] += 11.0

        async def heartbeat() -> None:
            scene.operations.renew_lease(heard.episode_id)

        scene.before_end = heartbeat
        await scene.abandoned.lapse()
    assert [(end.episode_id, end.status) for end in scene.ends] == [(gone.episode_id, "failed")]
    assert (gone.state, heard.state) == ("ended", "open")


async def test_nothing_is_left_to_end_of_a_group_that_retires_while_another_end_is_written(
    model: Path,
) -> None:
    async with scene_of(model) as scene:
        gone, retired = scene.episode(0), scene.episode(1)
        scene.clock.at_s[0] += 11.0

        async def retire() -> None:
            record = RetiredGroup(
                group_id=retired.opened.group_id, domain="d", purpose="train", reason="cancelled"
            )
            scene.context.registry.apply_retired_group(record)

        scene.before_end = retire
        await scene.abandoned.lapse()
    assert [(end.episode_id, end.status) for end in scene.ends] == [(gone.episode_id, "failed")]


async def test_an_end_that_is_under_way_when_the_group_closes_is_the_only_one(model: Path) -> None:
    async with scene_of(model) as scene:
        episode = scene.episode(0)
        closed = ClosedGroup(group_id="g-0", domain="d", purpose="train", detail="too late")
        scene.context.registry.apply_closed_group(closed)
        other = scene.context.registry.apply_opened_episode(
            opened(0, 1, attempt=0), lease_until_s=0.0
        )
        assert other is not None
        finishing: list[asyncio.Task[None]] = []

        async def finish() -> None:
            if not finishing:
                work = scene.operations.finish(other.episode_id, FinishRequest())
                finishing.append(asyncio.ensure_future(work))
                await asyncio.sleep(0)

        scene.before_end = finish
        await scene.abandoned.end_closed()
        await finishing[0]
    ends = {end.index: end.status for end in scene.ends}
    assert len(scene.ends) == 3
    assert (ends[0], ends[1], ends[2]) == ("failed", "completed", "failed")
    assert episode.state == "ended"


async def test_leases_run_from_the_moment_that_a_stopped_gateway_goes_on(model: Path) -> None:
    """A minute without a tick; what agents sent meanwhile is read after the next one."""
    async with scene_of(model) as scene:
        episode = scene.episode(0)
        ticking = asyncio.ensure_future(
            keep_ticking(scene.context, dispatcher=scene.dispatcher, operations=scene.operations)
        )
        await asyncio.sleep(TICK_S / 2)
        scene.clock.at_s[0] += 60.0
        await asyncio.sleep(2 * TICK_S)
        after_stop = episode.state
        for _ in range(8):
            scene.clock.at_s[0] += STALL_S / 2
            await asyncio.sleep(2 * TICK_S)
            if ticking.done():
                ticking.result()
        ticking.cancel()
    assert after_stop == "open"
    assert episode.state == "ended", "a lease of 10 s lapses, once there are 10 s of ticks"


async def test_no_lease_lapses_while_the_gateway_is_not_ready_for_requests(model: Path) -> None:
    ready = asyncio.Event()
    async with scene_of(model) as scene:
        episode = scene.episode(0)
        ticking = asyncio.ensure_future(
            keep_ticking(
                scene.context,
                dispatcher=scene.dispatcher,
                operations=scene.operations,
                is_ready=ready.is_set,
            )
        )
        states = []
        for _ in range(2):
            for _ in range(10):
                scene.clock.at_s[0] += STALL_S / 2
                await asyncio.sleep(2 * TICK_S)
            states.append(episode.state)
            ready.set()
        ticking.cancel()
    assert states == ["open", "ended"]


async def test_ticks_go_on_while_the_end_of_an_abandoned_episode_is_written(model: Path) -> None:
    async with scene_of(model) as scene:
        scene.episode(0)
        released = asyncio.Event()

        async def hold() -> None:
            await released.wait()

        scene.before_end = hold
        ticking = asyncio.ensure_future(
            keep_ticking(scene.context, dispatcher=scene.dispatcher, operations=scene.operations)
        )
        for _ in range(5):
            scene.clock.at_s[0] += STALL_S
            await asyncio.sleep(TICK_S)
        scene.operations.held_bytes = -1  # Every tick measures it again.
        await asyncio.sleep(2 * TICK_S)
        ends_during, measured = list(scene.ends), scene.operations.held_bytes
        released.set()
        await asyncio.sleep(2 * TICK_S)
        ticking.cancel()
    assert (ends_during, len(scene.ends)) == ([], 1)
    assert measured >= 0


@pytest.mark.parametrize("error", [LogUnavailableError, LogError])
@pytest.mark.parametrize("then", ["abort", "reward", "lapse"])
async def test_an_end_whose_answer_was_lost_is_the_episodes_end(
    model: Path, then: str, error: type[LogError]
) -> None:
    """The broker has the record, and the gateway does not hear so."""
    async with scene_of(model) as scene:
        episode = scene.episode(0, attempt=0)
        request = FinishRequest(result=msgspec.Raw(b'{"said":1}'))

        async def lose() -> None:
            raise error("no answer, or one that says nothing")

        scene.after_end = lose
        with pytest.raises(error):
            await scene.operations.finish(episode.episode_id, request)
        scene.after_end = None
        if then == "abort":
            await scene.operations.abort(episode.episode_id, AbortRequest())
        elif then == "lapse":
            scene.clock.at_s[0] += 11.0
            await scene.abandoned.lapse()
        else:
            reward = RewardRequest(reward_id="r", name="n", value=1.0)
            with pytest.raises(RefusedError) as refused:
                await scene.operations.reward(episode.episode_id, reward)
            assert refused.value.status == 409
            await scene.operations.finish(episode.episode_id, request)
    assert scene.ends[0] == scene.ends[1]
    assert (scene.ends[0].status, scene.ends[0].result) == ("completed", b'{"said":1}')
    assert episode.state == "ended"


async def test_an_end_that_the_log_does_not_take_is_written_by_a_later_tick(model: Path) -> None:
    async with scene_of(model) as scene:
        episode = scene.episode(0)
        scene.clock.at_s[0] += 11.0

        async def fail() -> None:
            raise LogUnavailableError("no answer in time")

        scene.before_end = fail
        await scene.abandoned.lapse()
        scene.before_end = None
        await scene.abandoned.lapse()
    assert [(end.episode_id, end.status) for end in scene.ends] == [(episode.episode_id, "failed")]
