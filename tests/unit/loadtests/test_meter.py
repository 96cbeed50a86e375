"""Of the coroutines on a loop, only those that are metered count."""

import asyncio
import time
from pathlib import Path

import pytest
from meter import Meter


async def busy(seconds: float, *, pauses: int) -> str:
    for _ in range(pauses):
        await asyncio.sleep(0)
        began_s = time.thread_time()
        while time.thread_time() - began_s < seconds / pauses:
            pass
    return "done"


async def test_steps_count_and_neither_waits_nor_other_coroutines_do(tmp_path: Path) -> None:
    meter = Meter(tmp_path / "meter")
    work = asyncio.ensure_future(meter.counting(busy(0.02, pauses=4)))
    other = asyncio.ensure_future(busy(0.2, pauses=4))
    assert await work == "done"
    await other
    await meter.counting(asyncio.sleep(0.3))
    assert 0.02 <= meter.cpu_s() < 0.2
    assert Meter(tmp_path / "meter").cpu_s() == meter.cpu_s(), "another process reads the same"


async def test_errors_and_cancellation_pass_through(tmp_path: Path) -> None:
    meter = Meter(tmp_path / "meter")
    seen = []

    async def cancelled() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("of the coroutine")

    with pytest.raises(ValueError, match="of the coroutine"):
        await meter.counting(failing())
    task = asyncio.ensure_future(meter.counting(cancelled()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]
