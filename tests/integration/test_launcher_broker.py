"""The run's own broker while a signal comes."""

import asyncio
import time

import psutil
import pytest

from forgemq_launcher.upkeep.broker import RunBroker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def test_a_signal_during_the_start_is_noticed_at_once_and_leaves_no_process(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    broker = RunBroker(tmp_path / "kafka", environ={}, note=lambda _: None)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, stop.set)
    started_s = time.monotonic()
    assert not await broker.start(stop=stop)
    assert time.monotonic() - started_s < 1.0
    await broker.stop()
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_a_start_that_nothing_interrupts_gives_an_address(tmp_path):
    broker = RunBroker(tmp_path / "kafka", environ={}, note=lambda _: None)
    try:
        assert await broker.start(stop=asyncio.Event())
        assert broker.connection.bootstrap.startswith("127.0.0.1:")
    finally:
        await broker.stop()
