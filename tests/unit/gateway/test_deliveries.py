"""A completion counts as delivered exactly if one of its clients was there when the log had it."""

import asyncio
from typing import Any

import pytest

from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_gateway.clock import Clock
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.deliveries import Deliveries
from forgemq_gateway.fenced_writer import FencedWriter
from forgemq_gateway.outbox import Outbox
from forgemq_gateway.ownership import ReadBack
from forgemq_gateway.wire import ClientGoneError
from forgemq_shell.dead_letters import DeadLetters
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.completions import completion_of
from tests.unit.gateway.hindered_log import HinderedLog
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.test_abandoned import owner_of_all
from tests.unit.gateway.test_held_and_leased import admitted, opened
from tests.unit.gateway.world import configuration_of, partitions_of

COMPLETION = completion_of(1, context=[1], output=[2])


class Scene:
    """Two clients of one completion, whose records the test lets pass one by one."""

    def __init__(self, deliveries: Deliveries, passes: list[asyncio.Event]) -> None:
        self.episode = HeldEpisode(opened(0, 0, attempt=0), lease_until_s=0.0)
        self.deliveries = deliveries
        self.passes = passes
        self.left: set[int] = set()
        self.broken: set[int] = set()
        """Numbers of the writes that the log does not take."""

    def record(self, client: int) -> "asyncio.Task[None]":
        writing = self.deliveries.record(
            self.episode, [COMPLETION], has_left=lambda: client in self.left
        )
        return asyncio.ensure_future(writing)


async def scene_of(model: Any) -> tuple[Scene, list[bytes]]:
    configuration, written = configuration_of(model), list[bytes]()
    passes = [asyncio.Event() for _ in range(3)]
    waiting = enumerate(passes)

    async def hold(emit: Emit) -> None:
        number, may_pass = next(waiting)
        await may_pass.wait()
        if number in scene.broken:
            raise LogUnavailableError("no answer in time")
        written.append(emit.value)

    log = HinderedLog(MemoryLog(run="r", clock_ms=wall_ms).open(), hold)
    await log.create_topics(partitions_of(configuration))
    writer: Any = await log.writer()
    dead_letters = DeadLetters(
        log,  # type: ignore[arg-type]
        writer,
        service="gateway",
        telemetry=Telemetry(service="gateway"),
    )
    read_back = ReadBack(log)  # type: ignore[arg-type]
    fenced = FencedWriter(
        log,  # type: ignore[arg-type]
        gateways=owner_of_all(),
        read_back=read_back,
        tasks=asyncio.TaskGroup(),
    )
    outbox = Outbox(
        writer,
        configuration=configuration,
        dead_letters=dead_letters,
        fenced=fenced,
        read_back=read_back,
    )
    scene = Scene(Deliveries(outbox, clock=Clock()), passes)
    return scene, written


async def test_a_delivery_that_was_withdrawn_stays_so_when_its_first_record_is_read_back(
    model: Any,
) -> None:
    """The client comes again before the feed has read that it had its answer, and that it left."""
    scene, written = await scene_of(model)
    registry = Registry()
    registry.apply_admitted_group(admitted(0))
    episode = registry.apply_opened_episode(scene.episode.opened, lease_until_s=0.0)
    assert episode is not None
    scene.episode = episode
    client = scene.record(1)
    await asyncio.sleep(0)
    scene.left.add(1)
    for each in scene.passes:
        each.set()
    with pytest.raises(ClientGoneError):
        await client
    first = topics.decode(topics.DELIVERED_COMPLETIONS, written[0])
    registry.apply_delivered_completion(first)  # type: ignore[arg-type]
    assert withdrawn(written) == [False, True]
    assert episode.delivered == set()


def withdrawn(written: list[bytes]) -> list[bool]:
    records = [topics.decode(topics.DELIVERED_COMPLETIONS, value) for value in written]
    return [record.is_withdrawn for record in records]  # type: ignore[attr-defined]


async def test_a_client_that_leaves_takes_no_answer_back_that_another_one_has(model: Any) -> None:
    """Two requests with the same body: the first is answered, and its client ends the second."""
    scene, written = await scene_of(model)
    first, second = scene.record(1), scene.record(2)
    await asyncio.sleep(0)
    scene.passes[0].set()
    await first
    scene.left.add(2)
    scene.passes[1].set()
    scene.passes[2].set()
    with pytest.raises(ClientGoneError):
        await second
    assert scene.episode.delivered == {COMPLETION.request_id}
    assert withdrawn(written) == [False, False]


async def test_an_answer_that_every_client_left_is_withdrawn_once(model: Any) -> None:
    scene, written = await scene_of(model)
    first, second = scene.record(1), scene.record(2)
    await asyncio.sleep(0)
    scene.left |= {1, 2}
    for each in scene.passes:
        each.set()
    for task in (first, second):
        with pytest.raises(ClientGoneError):
            await task
    assert scene.episode.delivered == set()
    assert withdrawn(written) == [False, False, True]


async def test_an_answer_is_not_delivered_if_one_client_left_and_the_other_is_refused(
    model: Any,
) -> None:
    scene, _ = await scene_of(model)
    first, second = scene.record(1), scene.record(2)
    await asyncio.sleep(0)
    scene.left.add(1)
    scene.passes[0].set()
    with pytest.raises(ClientGoneError):
        await first
    scene.broken.add(1)
    scene.passes[1].set()
    with pytest.raises(LogUnavailableError):
        await second
    assert scene.episode.delivered == set(), "the second client asks again, for the same answer"


async def test_the_records_of_all_choices_are_written_at_once(model: Any) -> None:
    scene, written = await scene_of(model)
    choices = [completion_of(number, context=[1], output=[2]) for number in (1, 2)]
    recording = asyncio.ensure_future(
        scene.deliveries.record(scene.episode, choices, has_left=lambda: False)
    )
    scene.passes[1].set()
    async with asyncio.timeout(5):
        while not written:  # noqa: ASYNC110 - the log has no event for it
            await asyncio.sleep(0)
        assert scene.episode.delivered == {choices[1].request_id}
        scene.passes[0].set()
        await recording
    assert scene.episode.delivered == {choice.request_id for choice in choices}
    assert len(written) == 2
