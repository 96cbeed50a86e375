"""The guarantees of a healthy run hold whenever it is audited, while it goes on."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_audit import run_report
from forgemq_audit.run_reader import RunReader
from forgemq_bus.log import Isolation, Log, Place, Reader
from forgemq_bus.memory import MemoryLog
from forgemq_launcher.records.run_topics import create_topics
from tests.unit.auditor.test_group_audit import audit_once, trim, write
from tests.unit.run_view.synthetic import SyntheticRun, configuration, started

HELD = dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)


@dataclass
class LogOfLiveRun:
    """A log on which the run goes on before each call of a reader."""

    log: Log
    go_on: Callable[[], Awaitable[None]]
    ends_given: int = 0

    async def reader(
        self,
        positions: Mapping[Place, int],
        *,
        isolation: Isolation = "committed",
        has_values: bool = True,
        gathers: bool = False,
    ) -> Reader:
        await self.go_on()
        return await self.log.reader(
            positions, isolation=isolation, has_values=has_values, gathers=gathers
        )

    async def committed(self, *, group: str, places: Sequence[Place]) -> dict[Place, int]:
        await self.go_on()
        return await self.log.committed(group=group, places=places)

    async def first_positions(self, places: Sequence[Place]) -> dict[Place, int]:
        await self.go_on()
        return await self.log.first_positions(places)

    async def end_positions(
        self, places: Sequence[Place], *, isolation: Isolation = "committed"
    ) -> dict[Place, int]:
        await self.go_on()
        self.ends_given += 1
        return await self.log.end_positions(places, isolation=isolation)


async def log_with_topics() -> MemoryLog:
    log = MemoryLog(run="r")
    await create_topics(log, configuration())
    return log


async def test_a_step_trained_while_the_audit_reads_does_not_break_a_guarantee():
    """Before one of the audit's calls, each in turn, the run trains a step; its trees may go."""
    run = SyntheticRun()
    run.train(0, [run.generate(n, version=0) for n in (0, 1)], is_last=False)
    before = len(run.messages)
    run.train(1, [run.generate(n, version=1) for n in (2, 3)], is_last=False)
    for is_trimmed in (False, True):
        for moment in range(40):
            log = await log_with_topics()
            await write(log, run.messages[:before])
            calls = iter(range(1_000))

            async def go_on(log: Log = log, calls=calls, moment=moment, goes=is_trimmed) -> None:
                if next(calls) == moment:
                    await write(log, run.messages[before:])
                    if goes:
                        await audit_once(log)
                        await trim(log)

            live = LogOfLiveRun(log, go_on)
            result, _ = await run_report.audit_run(live, started(), reason="", now_ms=61_000)
            assert result.guarantees == HELD, (moment, is_trimmed)
            assert result.steps in (1, 2)


async def test_catching_up_takes_nothing_in_that_comes_after_it_began():
    """A retirement that was read without its step would look like a contradiction."""
    run = SyntheticRun()
    run.train(0, [run.generate(n, version=0) for n in (0, 1)], is_last=False)
    before = len(run.messages)
    run.train(1, [run.generate(n, version=1) for n in (2, 3)], is_last=False)
    log = await log_with_topics()
    await write(log, run.messages[:before])
    left = [run.messages[before:]]

    async def go_on_once_the_ends_are_known() -> None:
        if live.ends_given and left:
            await write(log, left.pop())

    live = LogOfLiveRun(log, go_on_once_the_ends_are_known)
    follower = RunReader(live, started())
    await follower.catch_up()
    assert left == []
    assert follower.ledger.trained_group_ids() == ("g-0", "g-1")
    await audit_once(log)
    await follower.catch_up_on_audits()
    assert follower.ledger.trained_group_ids() == ("g-0", "g-1")
    assert follower.ledger.is_audited("g-2")


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
@pytest.mark.slow
async def test_records_audits_and_trimming_between_any_two_calls_break_no_guarantee(random):
    run = SyntheticRun().play(steps=3)
    log = await log_with_topics()
    left = list(run.messages)

    async def go_on() -> None:
        count = random.choice((0, 0, 1, 5, 20))
        await write(log, left[:count])
        del left[:count]
        if random.random() < 0.3:
            await audit_once(log)
        if random.random() < 0.5:
            await trim(log)

    for _ in range(random.randint(1, 12)):
        await go_on()
    live = LogOfLiveRun(log, go_on)
    result, _ = await run_report.audit_run(live, started(), reason="", now_ms=61_000)
    assert result.guarantees == HELD
