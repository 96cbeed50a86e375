"""Engines that die are started again, and one whose lane is removed never is."""

import asyncio
import threading
from typing import Any

import pytest

from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.upkeep.engine_servers import LaneServers
from forgemq_launcher.upkeep.engines import SILENT_MAX, Engines
from forgemq_sglang_cpu.server import EngineServerError
from forgemq_telemetry.causes import causes


class DyingServer:
    """Answers at once and is dead then; its second start takes until the test lets it end."""

    url, log_path = "http://127.0.0.1:1", "engine.log"

    def __init__(self) -> None:
        self.starts = 0
        self.has_process = False
        self.restarting, self.may_start = threading.Event(), threading.Event()

    def start(self) -> None:
        self.starts += 1
        if self.starts > 1:
            self.restarting.set()
            self.may_start.wait(10)
        self.has_process = True

    def stop(self) -> None:
        self.has_process = False

    def is_running(self) -> bool:
        return False

    def wait_healthy(self, **_: Any) -> float:
        return 0.0


async def test_an_engine_that_is_starting_again_when_its_lane_is_removed_is_stopped() -> None:
    server: Any = DyingServer()
    engines = Engines(
        [LaneServers(server, None)],
        policy=RestartPolicy(restarts_max=9, delay_first_s=0.0, delay_max_s=0.0),
        start_timeout_s=1.0,
        note=lambda _: None,
    )
    engines.start()
    keeping = asyncio.ensure_future(engines.keep(0))
    await asyncio.to_thread(server.restarting.wait, 10)
    keeping.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    has_ended_early = keeping.done()
    server.may_start.set()
    await asyncio.wait([keeping])
    await engines.remove(0)
    assert not has_ended_early, "what starts in a thread would start after the stop"
    assert (server.starts, server.has_process) == (2, False)


class SlowToStop(DyingServer):
    """Stops when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.stopping, self.may_stop = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.stopping.set()
        self.may_stop.wait(10)


async def test_the_gpus_of_a_removed_lane_are_free_once_its_engine_has_stopped() -> None:
    slow: Any = SlowToStop()
    other: Any = DyingServer()
    engines = Engines(
        [LaneServers(slow, gpus=frozenset({0, 1})), LaneServers(other, gpus=frozenset({2}))],
        policy=RestartPolicy(restarts_max=1, delay_first_s=0.0, delay_max_s=0.0),
        start_timeout_s=1.0,
        note=lambda _: None,
    )
    removing = asyncio.ensure_future(engines.remove(0))
    await asyncio.to_thread(slow.stopping.wait, 10)
    assert not engines.has(0)
    assert engines.gpus == {0, 1, 2}
    slow.may_stop.set()
    await removing
    assert engines.gpus == {2}


class ScriptedServer(DyingServer):
    """Each start has the next of these ends: when it is to die, or why it does not come up."""

    def __init__(self, *lives: str) -> None:
        super().__init__()
        self.lives = lives
        self.may_start.set()
        self.checks = 0

    @property
    def life(self) -> str:
        return self.lives[self.starts - 1]

    def start(self) -> None:
        super().start()
        if self.life == "no room":
            self.has_process = False
            raise EngineServerError("an engine needs about 2 GB of free memory\nmore")

    def wait_healthy(self, **_: Any) -> float:
        if self.life == "dies while it loads":
            self.has_process = False
            raise EngineServerError("the engine on port 1 ended with status 1 after 9 s; a log:\n")
        if self.life == "loads for too long":
            raise EngineServerError("the engine on port 1 did not answer /health within 1 s")
        return 0.0

    def is_running(self) -> bool:
        return self.has_process and self.life != "dies"

    def answers(self) -> bool:
        self.checks += 1
        return self.life == "lives" or self.checks < 3

    def log_tail(self) -> list[str]:
        return ["the last line"]


def kept(server: ScriptedServer, notes: list[str], *, restarts_max: int = 9) -> Engines:
    lanes: Any = [LaneServers(server, None)]  # type: ignore[arg-type]  # a part of a server
    engines = Engines(
        lanes,
        policy=RestartPolicy(restarts_max=restarts_max, delay_first_s=0.0, delay_max_s=0.0),
        start_timeout_s=1.0,
        note=notes.append,
        watch_every_s=0.0,
    )
    engines.start()
    return engines


async def until(server: ScriptedServer, *, checks: int) -> None:
    while server.life != "lives" or server.checks < checks:  # noqa: ASYNC110 - of a thread
        await asyncio.sleep(0.01)


async def test_an_engine_that_dies_in_its_restart_is_started_once_more() -> None:
    server = ScriptedServer("dies", "dies while it loads", "no room", "lives")
    notes: list[str] = []
    keeping = asyncio.ensure_future(kept(server, notes).keep(0))
    async with asyncio.timeout(10):
        await until(server, checks=1)
    assert not keeping.done()
    keeping.cancel()
    assert server.starts == 4
    assert notes == [
        "engine 0 answers at http://127.0.0.1:1",
        "engine 0 died; restarting in 0.0 s (engine.log)",
        "engine 0 did not start: the engine on port 1 ended with status 1 after 9 s; a log; "
        "restarting in 0.0 s (engine.log)",
        "engine 0 did not start: an engine needs about 2 GB of free memory; restarting in 0.0 s "
        "(engine.log)",
        "engine 0 answers at http://127.0.0.1:1",
    ]


async def test_an_engine_that_hangs_is_killed_and_started_again() -> None:
    server = ScriptedServer("hangs", "lives")
    notes: list[str] = []
    keeping = asyncio.ensure_future(kept(server, notes).keep(0))
    async with asyncio.timeout(10):
        await until(server, checks=2 + SILENT_MAX + 1)
    assert not keeping.done()
    keeping.cancel()
    assert notes[1:] == [
        f"engine 0 gave no answer to {SILENT_MAX} health checks; restarting in 0.0 s (engine.log)",
        "engine 0 answers at http://127.0.0.1:1",
    ]


@pytest.mark.parametrize(
    ("lives", "error"),
    [
        (("dies while it loads",), "ended with status 1 after 9 s"),
        (("no room",), "2 GB of free memory"),
        (("dies", "loads for too long"), "did not answer /health within 1 s"),
        (
            ("dies", "no room", "dies while it loads"),
            "engine 0 was lost 3 times; the last time it did not start: the engine on port 1 ended "
            "with status 1 after 9 s; a log:\nthe last line",
        ),
    ],
)
async def test_what_a_restart_cannot_mend_ends_the_run(lives: tuple[str, ...], error: str) -> None:
    async def run() -> None:
        await kept(ScriptedServer(*lives), [], restarts_max=2).keep(0)

    with pytest.raises((EngineServerError, ExceptionGroup)) as raised:
        await asyncio.wait_for(run(), timeout=10)
    (cause,) = causes(raised.value)
    assert isinstance(cause, EngineServerError)
    assert error in str(cause)
