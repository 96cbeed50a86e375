"""A group that was asked for once is admitted once, however many retired since."""

import pytest

from forgemq_contracts.accounting import RetiredIds
from forgemq_contracts.groups import MergedGroup, RequestedGroup, RetiredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.partitions import group_id
from forgemq_contracts.weights import ReportedEngine
from forgemq_scheduler.core import SchedulerCore
from tests.unit.scheduler.scene import configuration_of, queue_of

RUN = configuration_of(queue_of(slots=4, per_step=2, window=4))


def requested(number: int) -> RequestedGroup:
    key = f"d/{number}"
    return RequestedGroup(
        group_id=group_id(run="test", domain="d", idempotency_key=key),
        domain="d",
        purpose="train",
        group_size=2,
        task=b"{}",
        idempotency_key=key,
        requested_ms=0,
    )


def give(core: SchedulerCore, record: object) -> list[object]:
    message = Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record)
    return [output.record for output in core.handle(message)]


def retire(core: SchedulerCore, number: int) -> list[object]:
    """Let a group end without an advantage, which retires it."""
    request = requested(number)
    return give(
        core,
        MergedGroup(
            group_id=request.group_id,
            domain="d",
            purpose="train",
            partition=0,
            not_trainable="zero_variance",
        ),
    )


def serving(core: SchedulerCore) -> SchedulerCore:
    """Let one engine serve, so that groups are admitted."""
    give(
        core,
        ReportedEngine(
            lane=0,
            epoch=1,
            url="",
            is_serving=True,
            lineage=0,
            version=0,
            running=0,
            queued=0,
            reported_ms=0,
        ),
    )
    return core


def played(core: SchedulerCore, groups: int) -> int:
    """Ask for so many groups and retire each; returns how many retired."""
    retired = 0
    for number in range(groups):
        give(core, requested(number))
        retired += sum(isinstance(one, RetiredGroup) for one in retire(core, number))
    return retired


def again(core: SchedulerCore, groups: int, *, every: int) -> list[object]:
    """What the core does when agents start over and ask for groups once more."""
    return [out for number in range(0, groups, every) for out in give(core, requested(number))]


def test_agents_that_start_over_get_no_group_a_second_time():
    core = serving(SchedulerCore(RUN))
    core._retired = RetiredIds(ids_max=20)
    assert played(core, 200) == 200
    restored = SchedulerCore(RUN)
    restored.restore(core.snapshot())
    assert again(core, 200, every=1) == []
    assert again(restored, 200, every=1) == []


@pytest.mark.slow
def test_a_run_of_three_hundred_thousand_groups_repeats_none_and_stays_small():
    core = serving(SchedulerCore(RUN))
    assert played(core, 300_000) == 300_000
    assert again(core, 300_000, every=97) == []
    assert len(core.snapshot()) < 300_000  # 262,144 of them are the digests for late records.


def test_a_snapshot_without_keys_still_knows_its_ids():
    core = serving(SchedulerCore(RUN))
    played(core, 5)
    core._asked.restore(b"")
    assert again(core, 5, every=1) == []
