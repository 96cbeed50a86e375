"""A run whose bulk topics are trimmed is reported as one that keeps everything."""

from forgemq_audit import run_report
from forgemq_bus.memory import MemoryLog
from forgemq_launcher.records.run_topics import create_topics
from tests.unit.auditor.test_group_audit import (
    TRIMMED,
    audit_once,
    kept_ids,
    places_of,
    trim,
    write,
)
from tests.unit.run_view.synthetic import SyntheticRun, configuration, started


class Times:
    """The log's clock, which the test moves."""

    def __init__(self) -> None:
        self.ms = 0

    def now_ms(self) -> int:
        return self.ms


async def test_the_report_of_a_trimmed_run_is_that_of_a_run_kept_whole():
    run = SyntheticRun().play(steps=3)
    reports = []
    for audits in (0, 1, 3):
        # The run's own records have the same times, however many others the auditor writes.
        times = Times()
        log = MemoryLog(run="r", clock_ms=times.now_ms)
        await create_topics(log, configuration())
        size = len(run.messages) // max(1, audits)
        for start in range(0, len(run.messages), size):
            for message in run.messages[start : start + size]:
                times.ms += 1
                await write(log, [message])
            if audits:
                await audit_once(log)
                await trim(log)
        result, _ = await run_report.audit_run(log, started(), reason="completed", now_ms=61_000)
        reports.append((result, await kept_ids(log)))
    (whole, everything), *trimmed = reports
    assert len(everything) == 6
    assert whole.guarantees == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert [kept for _, kept in trimmed] == [set(), set()]
    assert [result for result, _ in trimmed] == [whole, whole]


async def test_a_trained_group_that_nobody_compared_before_it_was_deleted_is_unknown():
    run = SyntheticRun().play(steps=3)
    log = MemoryLog(run="r")
    await create_topics(log, configuration())
    await write(log, run.messages)
    ends = await log.end_positions(places_of(*TRIMMED))
    await log.trim(ends)
    result, _ = await run_report.audit_run(log, started(), reason="completed", now_ms=61_000)
    assert [name for name, holds in result.guarantees.items() if not holds] == ["G2", "G3", "G4"]
