"""A change of a group wakes those who wait for that group, and nobody else."""

import asyncio
from collections import Counter

from forgemq_gateway.change_signal import ChangeSignal


class Waiters:
    """One task a group that waits for its answer, and how often each has looked."""

    def __init__(self, *groups: str) -> None:
        self.signal = ChangeSignal()
        self.looks: Counter[str] = Counter()
        self.answers: dict[str, str] = {}
        self.tasks = {group: asyncio.ensure_future(self._wait(group)) for group in groups}

    async def _wait(self, group: str) -> str | None:
        return await self.signal.until(lambda: self._look(group), group_id=group, timeout_s=20)

    def _look(self, group: str) -> str | None:
        self.looks[group] += 1
        return self.answers.get(group)


async def settle() -> None:
    """Let every task run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_only_those_who_wait_for_the_group_look_again() -> None:
    waiters = Waiters("a", "b")
    await settle()
    for _ in range(3):
        waiters.signal.notify("a")
        await settle()
    waiters.signal.notify("c")
    assert waiters.looks == {"a": 4, "b": 1}
    waiters.answers = {"a": "found", "b": "found"}
    waiters.signal.notify_all()
    assert await asyncio.gather(*waiters.tasks.values()) == ["found", "found"]


async def test_nothing_is_kept_for_a_group_that_nobody_waits_for() -> None:
    waiters = Waiters("a", "b")
    await settle()
    assert len(waiters.signal._waited) == 2
    waiters.tasks["a"].cancel()
    waiters.answers["b"] = "found"
    waiters.signal.notify("b")
    await settle()
    assert len(waiters.signal._waited) == 0


async def test_who_waits_past_the_time_looks_once_more() -> None:
    signal, looks = ChangeSignal(), []

    def look() -> None:
        looks.append(1)

    await signal.until(look, group_id="a", timeout_s=0.0)
    assert len(looks) == 2
