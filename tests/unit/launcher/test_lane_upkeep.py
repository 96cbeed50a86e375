"""Processes of lanes are started and stopped as the plan of lanes says; with real processes."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.lane_plan import LaneChange, RequestedLane
from forgemq_contracts.messages import Output
from forgemq_contracts.run import LogLayout
from forgemq_contracts.topics import REQUESTED_LANES
from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.records.lane_follower import follow_lanes
from forgemq_launcher.upkeep.engine_servers import LaneServers
from forgemq_launcher.upkeep.lane_upkeep import LaneUpkeep
from forgemq_launcher.upkeep.named_engines import NamedEngines
from forgemq_launcher.upkeep.supervisor import ProcessFailedError, ServiceSpec, Supervisor
from forgemq_shell.records import emit_of

LAYOUT = LogLayout(lanes=2, lanes_max=3)
ENGINES = ("http://127.0.0.1:1", "http://127.0.0.1:2")
SERVES = "import time; print('up', flush=True); time.sleep(60)"
REFUSES = "raise SystemExit(2)"


class Scene:
    """Lanes of a run whose inference processes run this code, by the address of their engine."""

    def __init__(self, folder: Path, code: dict[str, str]) -> None:
        self.log = MemoryLog(run="r")
        self.notes: list[str] = []
        self.started: list[tuple[int, str]] = []
        policy = RestartPolicy(restarts_max=2, delay_first_s=0.01, delay_max_s=0.02)
        self.supervisor = Supervisor(policy=policy, grace_s=5.0, note=self.notes.append)
        self._folder, self._code = folder, code
        self.upkeep = LaneUpkeep(
            NamedEngines(ENGINES, silence_s_max=1000.0, note=lambda _: None),
            self.supervisor,
            spec_of=self.spec,
            engines_of=self._no_engine,
            note=self.notes.append,
        )

    def spec(self, lane: int, url: str, prefill_url: str = "") -> ServiceSpec:
        assert prefill_url == ""
        self.started.append((lane, url))
        name = f"inference-{lane}"
        (self._folder / f"lane_{lane}_module.py").write_text(self._code.get(url, SERVES))
        return ServiceSpec(
            name=name,
            module=f"lane_{lane}_module",
            environ={**os.environ, "PYTHONPATH": str(self._folder)},
            log_path=self._folder / f"{name}.log",
            stop_stage=0,
            lane=lane,
        )

    async def ask(self, change: LaneChange, lane: int, *, engine_url: str = "") -> None:
        record = RequestedLane(
            lane=lane, change=change, change_id="0" * 32, requested_ms=0, engine_url=engine_url
        )
        writer = await self.log.writer()
        await writer.write(emit_of(Output(topic=REQUESTED_LANES.name, partition=0, record=record)))
        await writer.close()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():  # noqa: ASYNC110 - processes have no event
                await asyncio.sleep(0.02)

    def up(self) -> set[str]:
        return {each.name for each in self.supervisor.statuses() if each.pid is not None}

    def _no_engine(self, lane: int) -> LaneServers:
        raise AssertionError(f"no engine is started for lane {lane} of named engines")


@asynccontextmanager
async def scene_of(folder: Path, code: dict[str, str]) -> AsyncIterator[Scene]:
    """The lanes with which the run begins are up, and the plan is followed."""
    scene = Scene(folder, code)
    await scene.log.create_topics({REQUESTED_LANES.name: 1})
    async with asyncio.TaskGroup() as group:
        first = {lane: scene.spec(lane, url) for lane, url in enumerate(ENGINES)}
        scene.upkeep.begin(group, first, may_end=lambda: False)
        following = group.create_task(follow_lanes(scene.log, LAYOUT, apply=scene.upkeep.follow))
        await scene.until(lambda: scene.up() == {"inference-0", "inference-1"})
        yield scene
        following.cancel()
        for lane in range(3):
            await scene.upkeep.follow({})
            await scene.supervisor.end(f"inference-{lane}")


async def test_processes_follow_the_plan(tmp_path: Path):
    async with scene_of(tmp_path, {}) as scene:
        await scene.ask("add", 2, engine_url="http://127.0.0.1:3")
        await scene.until(lambda: scene.up() == {"inference-0", "inference-1", "inference-2"})
        await scene.ask("drain", 1)
        await scene.ask("remove", 0)
        await scene.until(lambda: scene.up() == {"inference-1", "inference-2"})
        assert "lane 0 is removed; its processes end" in scene.notes
        await scene.ask("add", 0, engine_url="http://127.0.0.1:4")
        await scene.until(lambda: scene.up() == {"inference-0", "inference-1", "inference-2"})


async def test_a_resumed_lane_has_the_engine_with_which_it_was_added(tmp_path: Path):
    """Lane 0 was added again with the engine that it began with, lane 1 with another one."""
    scene = Scene(tmp_path, {})
    await scene.log.create_topics({REQUESTED_LANES.name: 1})
    for lane, url in enumerate(("http://localhost:1/", "http://127.0.0.1:9")):
        await scene.ask("remove", lane)
        await scene.ask("add", lane, engine_url=url)
    async with asyncio.TaskGroup() as group:
        first = {lane: scene.spec(lane, url) for lane, url in enumerate(ENGINES)}
        scene.started.clear()
        scene.upkeep.begin(group, first, may_end=lambda: False)
        following = group.create_task(follow_lanes(scene.log, LAYOUT, apply=scene.upkeep.follow))
        await scene.until(lambda: bool(scene.started))
        await scene.until(lambda: scene.up() == {"inference-0", "inference-1"})
        following.cancel()
        await scene.upkeep.follow({})
    assert scene.started == [(1, "http://127.0.0.1:9")]
    said = "lane 1 was added with the engine at http://127.0.0.1:9, and has that one"
    assert scene.notes.count(said) == 1


async def test_an_added_lane_that_fails_is_given_up_and_the_run_goes_on(tmp_path: Path):
    async with scene_of(tmp_path, {"http://refused:1": REFUSES}) as scene:
        await scene.ask("add", 2, engine_url="http://refused:1")
        await scene.until(lambda: any("lane 2 is given up: " in note for note in scene.notes))
        assert scene.up() == {"inference-0", "inference-1"}
        await scene.ask("remove", 2)
        await scene.ask("add", 2, engine_url="http://127.0.0.1:3")
        await scene.until(lambda: "inference-2" in scene.up())


async def test_a_lane_without_an_address_is_given_up_if_the_engines_are_named(tmp_path: Path):
    async with scene_of(tmp_path, {}) as scene:
        await scene.ask("add", 2)
        await scene.until(lambda: any("add the lane with the address" in n for n in scene.notes))
        assert scene.up() == {"inference-0", "inference-1"}


async def test_a_lane_of_the_beginning_that_fails_is_the_runs_failure(tmp_path: Path):
    scene = Scene(tmp_path, {ENGINES[0]: REFUSES})
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            scene.upkeep.begin(group, {0: scene.spec(0, ENGINES[0])}, may_end=lambda: False)
    assert raised.group_contains(ProcessFailedError, match="inference-0 ended with status 2")
