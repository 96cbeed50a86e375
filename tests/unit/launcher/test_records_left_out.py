"""Records that a command cannot decode, such as those of a run of a later release."""

import pytest

from forgemq_audit.run_report import up_s
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts.messages import Output
from forgemq_contracts.run import EndedRun, StartedRun
from forgemq_contracts.topics import (
    ENDED_RUNS,
    REQUESTED_GROUPS,
    SCORED_GROUPS,
    STARTED_RUNS,
    Topic,
)
from forgemq_launcher.commands.inspection import end_of
from forgemq_launcher.records.evaluation import evaluation_of
from forgemq_shell.announced_runs import announced_runs
from tests.unit.launcher.test_follower import log_of
from tests.unit.run_view.synthetic import SyntheticRun, configuration, started

ENDED = EndedRun(run="r", reason="completed", ended_ms=5_000)


def of_all_runs(topic: Topic, record: StartedRun | EndedRun) -> Output:
    return Output(topic=topic.name, partition=0, record=record)


async def log_with_unreadable(*topics: Topic) -> MemoryLog:
    """A run that is over, and behind its records one in each topic that does not decode."""
    log = await log_of(
        SyntheticRun().play(steps=1),
        of_all_runs(STARTED_RUNS, started()),
        of_all_runs(ENDED_RUNS, ENDED),
    )
    writer = await log.writer()
    for topic in topics:
        await writer.write(Emit(topic=topic.name, partition=0, key=b"other", value=b"unreadable"))
    return log


@pytest.mark.parametrize("topic", [STARTED_RUNS, ENDED_RUNS], ids=lambda topic: topic.name)
async def test_the_runs_of_a_broker_are_listed_without_those_that_do_not_decode(topic):
    (found,) = await announced_runs(await log_with_unreadable(topic))
    assert (found.started, found.ended) == (started(), ENDED)


async def test_the_end_of_a_run_is_found_beside_one_that_does_not_decode():
    assert await end_of(await log_with_unreadable(ENDED_RUNS), started()) == ENDED


async def test_the_time_of_a_run_is_counted_beside_starts_and_ends_that_do_not_decode():
    log = await log_with_unreadable(STARTED_RUNS, ENDED_RUNS)
    assert await up_s(log, configuration(), now_ms=9_000) == 4.0


async def test_a_judged_run_is_summed_up_without_groups_that_do_not_decode():
    whole = await evaluation_of(await log_with_unreadable(), started(), samples=1)
    log = await log_with_unreadable(REQUESTED_GROUPS, SCORED_GROUPS)
    assert whole[0].episodes > 0
    assert await evaluation_of(log, started(), samples=1) == whole
