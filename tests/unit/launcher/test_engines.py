"""Engines that die are started again, and one whose lane is removed never is."""

import asyncio
import threading
from typing import Any

from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.upkeep.engine_servers import LaneServers
from forgemq_launcher.upkeep.engines import Engines


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
