"""What the first signal and the next ones do to a run; with real signals."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from forgemq_launcher.upkeep.stop_signal import ECHO_S, SIGNALS, StopSignal


class SignalScene:
    """A listening StopSignal, its clock, and what it did."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.kills = 0
        self.notes: list[str] = []
        self.stop = StopSignal(kill=self._kill, note=self.notes.append, clock_s=lambda: self.now_s)
        self.stop.listen()

    async def send(self, number: int, *, after_s: float = 0.0) -> None:
        self.now_s += after_s
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.05)  # The loop reads signals from a pipe.

    def _kill(self) -> None:
        self.kills += 1


@pytest.fixture
async def scene() -> Iterator[SignalScene]:
    yield SignalScene()
    for number in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_first_signal_of_any_kind_stops_and_kills_nothing(scene, number):
    await scene.send(number)
    assert (scene.stop.event.is_set(), scene.kills) == (True, 0)
    assert scene.notes == ["stopping everything; Ctrl-C again kills"]


async def test_a_second_signal_kills_unless_it_is_the_echo_of_the_first(scene):
    await scene.send(signal.SIGINT)
    await scene.send(signal.SIGINT, after_s=0.9 * ECHO_S)
    assert scene.kills == 0
    await scene.send(signal.SIGINT, after_s=0.1 * ECHO_S)
    assert scene.kills == 1
    assert len(scene.notes) == 1


async def test_waiting_ends_at_the_signal_or_when_the_agents_have_ended(scene):
    ended = asyncio.Event()
    waiting = asyncio.ensure_future(scene.stop.wait_unless(ended))
    await asyncio.sleep(0)
    assert not waiting.done()
    ended.set()
    await asyncio.wait_for(waiting, timeout=5)
    assert not scene.stop.event.is_set()
    await scene.send(signal.SIGHUP)
    await asyncio.wait_for(scene.stop.wait_unless(asyncio.Event()), timeout=5)


async def test_work_ends_without_a_result_once_a_second_signal_has_killed_what_it_asks(scene):
    asked = asyncio.Event()
    working = asyncio.ensure_future(asked.wait())
    result = asyncio.ensure_future(scene.stop.unless_killed(working))
    await scene.send(signal.SIGINT)
    assert not result.done()
    await scene.send(signal.SIGINT, after_s=ECHO_S)
    assert await asyncio.wait_for(result, timeout=5) is None
    assert working.cancelled()


async def test_work_that_is_done_before_a_second_signal_keeps_its_result_or_its_error(scene):
    async def fail() -> None:
        raise OSError("the disk is full")

    await scene.send(signal.SIGINT)
    assert await scene.stop.unless_killed(asyncio.sleep(0, result=130)) == 130
    with pytest.raises(OSError, match="the disk is full"):
        await scene.stop.unless_killed(fail())
