"""A round of an audit is bounded, and rounds find what one audit of everything finds."""

import tracemalloc
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_audit.group_index import ROUND_LIMITS, RoundLimits
from forgemq_audit.unaudited import unaudited
from forgemq_auditor.group_audit import AuditRound, GroupAudit
from forgemq_bus.log import Log
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.audit import TreeFacts
from forgemq_contracts.completions import FinishedCompletion
from tests.unit.auditor.test_group_audit import (
    PARTITIONS,
    audit_once,
    audited_groups,
    kept_ids,
    log_with_topics,
    trim,
    whole,
    write,
)
from tests.unit.run_view.synthetic import SyntheticRun, configuration

LIMITS = RoundLimits(groups_max=2)
MESSAGE_BYTES = 20_000
LONG = b'[{"role":"user","content":"%s"}]' % (b"x" * MESSAGE_BYTES)


async def round_of_a_new_auditor(log: Log, limits: RoundLimits) -> AuditRound:
    """What an auditor does that is killed after one round."""
    auditor = await GroupAudit.open(log, configuration=configuration(), limits=limits)
    done = await auditor.audit()
    await auditor.close()
    return done


async def log_of(run: SyntheticRun) -> MemoryLog:
    log = await log_with_topics()
    await write(log, run.messages)
    return log


def with_long_messages(run: SyntheticRun) -> SyntheticRun:
    def longer(record: msgspec.Struct) -> msgspec.Struct:
        assert isinstance(record, FinishedCompletion)
        turn = msgspec.structs.replace(record.turn, messages=LONG)
        return msgspec.structs.replace(record, turn=turn)

    run.messages[:] = run.changed(topics.FINISHED_COMPLETIONS, longer)
    return run


async def facts_of(log: Log, *, limits: RoundLimits) -> list[TreeFacts]:
    return [facts async for facts in unaudited(log, configuration=configuration(), limits=limits)]


async def test_rounds_take_what_their_limit_says_and_find_what_one_audit_finds():
    run = SyntheticRun().play(steps=6)
    log = await log_of(run)
    auditor = await GroupAudit.open(log, configuration=configuration(), limits=LIMITS)
    done = [await auditor.audit()]
    while done[-1].has_more:
        done.append(await auditor.audit())
    assert sum(each.groups for each in done) == 12
    assert max(each.groups for each in done) <= LIMITS.groups_max * PARTITIONS
    assert len(done) >= 3
    assert await auditor.audit() == AuditRound(groups=0, has_more=False)
    assert await audited_groups(log) == await whole(run)
    await trim(log)
    assert await kept_ids(log) == set()


async def test_every_round_lets_go_of_what_it_has_compared():
    log = await log_of(SyntheticRun().play(steps=6))
    auditor = await GroupAudit.open(log, configuration=configuration(), limits=LIMITS)
    kept = [len(await kept_ids(log))]
    while (await auditor.audit()).has_more:
        await trim(log)
        kept.append(len(await kept_ids(log)))
    assert len(kept) >= 3
    assert kept == sorted(set(kept), reverse=True)


async def test_groups_larger_than_the_limit_in_bytes_go_one_by_one():
    run = with_long_messages(SyntheticRun().play(steps=4))
    log = await log_of(run)
    limits = RoundLimits(bytes_max=MESSAGE_BYTES)
    auditor = await GroupAudit.open(log, configuration=configuration(), limits=limits)
    done = await auditor.audit()
    assert done == AuditRound(groups=PARTITIONS, has_more=True)
    while done.has_more:
        done = await auditor.audit()
    assert await audited_groups(log) == await whole(run)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=5), st.randoms(use_true_random=False))
@pytest.mark.slow
async def test_killed_after_any_round_each_group_is_audited_once(pieces, random):
    run = SyntheticRun().play(steps=4)
    run.admit("g-8", index=8, version=4)
    run.episode("g-8", 0, version=4)  # Stays open.
    log = await log_with_topics()
    messages = list(run.messages)
    while messages:
        size = pieces.pop() if pieces else len(messages)
        batch, messages = messages[:size], messages[size:]
        await write(log, batch)
        for _ in range(random.randint(0, 2)):
            await round_of_a_new_auditor(log, RoundLimits(groups_max=random.randint(1, 3)))
            await trim(log)
    while (await round_of_a_new_auditor(log, LIMITS)).has_more:
        await trim(log)
    assert await audited_groups(log) == await whole(run)
    assert "g-8" in await kept_ids(log)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5_000), st.integers(0, 8))
async def test_facts_without_an_auditor_do_not_depend_on_the_rounds(groups, size_bytes, audited):
    run = SyntheticRun().play(steps=4)
    log = await log_with_topics()
    cut = len(run.messages) * audited // 8
    await write(log, run.messages[:cut])
    await audit_once(log)
    await trim(log)
    await write(log, run.messages[cut:])
    limits = RoundLimits(groups_max=groups, bytes_max=size_bytes)
    found = await facts_of(log, limits=limits)
    everything = await facts_of(log, limits=ROUND_LIMITS)
    assert sorted(found, key=str) == sorted(everything, key=str)
    stays = {each.group_id for each in await audited_groups(log)}
    assert stays | {each.group_id for each in found} == {f"g-{n}" for n in range(8)}


async def first_round(log: Log) -> None:
    assert (await round_of_a_new_auditor(log, LIMITS)).has_more


async def all_facts(log: Log) -> None:
    async for facts in unaudited(log, configuration=configuration(), limits=LIMITS):
        assert facts.differences == ()


@pytest.mark.parametrize("reading", [first_round, all_facts])
async def test_memory_does_not_grow_with_the_backlog(reading: Callable[[Log], Awaitable[None]]):
    peaks = []
    for steps in (8, 32):
        run = SyntheticRun().play(steps=steps)
        for group_id in ("g-0", "g-1"):
            run.episode(group_id, 0, version=0)  # Comes late: these lie across the whole log.
        log = await log_of(with_long_messages(run))
        tracemalloc.start()
        await reading(log)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    short, long = peaks
    backlog_bytes = 64 * 4 * MESSAGE_BYTES  # Four completions in each of the longer log's groups.
    assert long < 1.5 * short
    assert long < backlog_bytes / 4
