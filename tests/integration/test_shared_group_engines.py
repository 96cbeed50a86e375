"""One process group of the trainer and three real engines: formed, broken, and formed again."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Log
from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.run import StartedRun
from forgemq_contracts.weights import LoadedWeights
from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.server import EngineServer
from forgemq_shell.service import Context
from forgemq_telemetry import Telemetry
from forgemq_trainer.lane_watch import watch_lanes
from forgemq_trainer.previous_lives import TrainerLife
from forgemq_trainer.publisher import EnginePaths, Publisher
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.storage.weights import SavedVersion, read_weights_folder
from forgemq_trainer.weight_paths import broadcasts_of
from tests.engine_fixture import START_TIMEOUT_S, engine_options
from tests.integration.test_weights_engine import CONTEXT, logprobs, perturbed, spans
from tests.lane_scene import LaneScene, configuration, create_topics

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]

LANES = (0, 1, 2)
DEADLINE_S = 20.0
SETTLED_S = 90.0


@pytest.fixture
def servers(engine_model: Path, tmp_path: Path) -> Iterator[tuple[EngineServer, EngineServer]]:
    """The engines of lanes 0 and 1; that of lane 2 is the session's."""
    first, second = (
        EngineServer(str(engine_model), tmp_path / name, port=free_port(), options=engine_options())
        for name in ("first", "second")
    )
    with ExitStack() as stack:
        for server in (first, second):
            stack.callback(server.stop)
            server.start()
        for server in (first, second):
            server.wait_healthy(timeout_s=START_TIMEOUT_S)
        yield first, second


@dataclass
class Trainer:
    """The trainer's publisher, without training."""

    publisher: Publisher
    events: StringIO

    async def publish(self, folder: Path, version: int) -> None:
        saved = SavedVersion(version=version, weights=read_weights_folder(folder))
        await self.publisher.publish(saved, headers=())

    def named(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.events.getvalue().splitlines()]
        return [line for line in lines if line["event"] == event]

    async def until_formed(self, *lanes: int) -> None:
        """Wait until the newest group has these lanes."""
        async with asyncio.timeout(SETTLED_S):
            while True:
                if [each["lanes"] for each in self.named("group_formed")[-1:]] == [list(lanes)]:
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def training(log: Log, model: Path) -> AsyncIterator[Trainer]:
    events = StringIO()
    settings = TrainerSettings(
        folder="unused", fast_path="gloo-shared", transfer_deadline_s=DEADLINE_S
    )
    context = Context(
        started=StartedRun(
            run="r",
            configuration=configuration(model, lanes=len(LANES)),
            blobs="memory://",
            started_ms=1,
        ),
        log=log,
        blobs=BlobStore("memory://blobs", run="r"),
        telemetry=Telemetry(service="trainer", stream=events),
        stop=asyncio.Event(),
        environ={},
    )
    life = TrainerLife(
        lineage=1, claim=await log.transaction_writer("trainer"), writer=await log.writer()
    )
    paths = EnginePaths(broadcasts=broadcasts_of(settings, device="cpu"))
    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(context, settings, life=life, paths=paths, tasks=tasks)
        watch = watch_lanes(context, publisher, lineage=1, known=asyncio.Event())
        watching = tasks.create_task(watch)
        try:
            yield Trainer(publisher, events)
        finally:
            watching.cancel()
            await publisher.close()


async def loaded(scene: LaneScene, version: int) -> LoadedWeights:
    """The lane's record of this version, waited for."""
    async with asyncio.timeout(SETTLED_S):
        while True:
            for record in await scene.loaded(count=1):
                if record.version == version:
                    return record
            await asyncio.sleep(0.05)


async def check_serve(scenes: list[LaneScene], model: Path, *, version: int) -> None:
    """What each lane samples has the log-probabilities of this model, under this version."""
    before = len(await scenes[0].finished())
    for number, scene in enumerate(scenes, start=11):
        await scene.request(number, CONTEXT, max_tokens=20)
    count = before + len(scenes)
    records = (await scenes[0].finished(count=count, timeout_s=SETTLED_S))[before:]
    assert {record.lane for record in records} == set(LANES)
    for record in records:
        assert spans(record) == [(0, len(record.output) // 4, 1, version)]
        tokens = CONTEXT + unpack_ids(record.output)
        expected = logprobs(model, tokens, first=len(CONTEXT))
        assert unpack_floats(record.logprobs) == pytest.approx(expected, abs=1e-3)


async def test_versions_come_through_one_group_that_is_formed_again_when_an_engine_dies_or_returns(
    servers: tuple[EngineServer, EngineServer],
    base_engine_url: str,
    engine_model: Path,
    tmp_path: Path,
) -> None:
    """The engine of rank 1 passes on what that of rank 3 gets, so that its death breaks both."""
    models = [
        perturbed(engine_model, tmp_path / f"version-{version}", seed=version)
        for version in (1, 2, 3, 4)
    ]
    log = MemoryLog(run="r")
    await create_topics(log, lanes=len(LANES))
    urls = (servers[0].url, servers[1].url, base_engine_url)
    scenes = [
        LaneScene(log, model=engine_model, engine_url=url, lane=lane, lanes=len(LANES))
        for lane, url in enumerate(urls)
    ]
    async with AsyncExitStack() as stack:
        for scene in scenes:
            await stack.enter_async_context(scene.serving())
            await scene.report(is_serving=True)
        trainer = await stack.enter_async_context(training(log, engine_model))
        await trainer.publish(engine_model, 0)
        await trainer.until_formed(0, 1, 2)

        for number, scene in enumerate(scenes, start=1):
            await scene.request(number, [*CONTEXT, number], max_tokens=900, temperature=5.0)
            await scene.until_running()
        await trainer.publish(models[0], 1)
        assert [(await loaded(scene, 1)).path for scene in scenes] == ["fast"] * 3
        records = await scenes[0].finished(count=3, timeout_s=SETTLED_S)
        assert any(len(record.spans) == 2 for record in records)

        group = servers[0].pid
        assert group is not None
        os.killpg(group, signal.SIGSTOP)
        started_s = time.monotonic()
        await trainer.publish(models[1], 2)
        await asyncio.sleep(2.0)
        os.killpg(group, signal.SIGKILL)
        second, third = [await loaded(scene, 2) for scene in scenes[1:]]
        # Its deadline, and the time of a load from disk on a busy machine.
        assert time.monotonic() - started_s < DEADLINE_S + 20
        assert third.path == "durable"
        assert second.version == 2

        await trainer.until_formed(1, 2)
        await trainer.publish(models[2], 3)
        assert [(await loaded(scene, 3)).path for scene in scenes[1:]] == ["fast"] * 2

        servers[0].start()
        await scenes[0].report(is_serving=True, timeout_s=START_TIMEOUT_S)
        await trainer.until_formed(0, 1, 2)
        await trainer.publish(models[3], 4)
        assert [(await loaded(scene, 4)).path for scene in scenes] == ["fast"] * 3
        await check_serve(scenes, models[3], version=4)
    for scene in scenes:
        assert scene.events_named("wrong_tensor") == []
        assert scene.events_named("read_back_off") == []
