"""When a run is given up because its groups fail, and when it is not."""

import pytest

from forgemq_contracts.groups import MergedGroup, NotTrainable, RetiredGroup, RetireReason
from forgemq_contracts.run import Queue
from forgemq_launcher.core.failing_groups import FailingGroups

QUEUES = tuple(
    Queue(domain=domain, task_source="", agent="", slots=2, groups_per_step=1)
    for domain in ("shop", "code")
)


def failing(*, groups_max: int = 3) -> FailingGroups:
    return FailingGroups(QUEUES, groups_max=groups_max, since_ms=1000)


def retire(
    counted: FailingGroups,
    *reasons: RetireReason,
    domain: str = "shop",
    purpose: str = "train",
    at_ms: int = 1000,
) -> None:
    for number, reason in enumerate(reasons):
        group = RetiredGroup(
            group_id=f"g-{number}",
            domain=domain,
            purpose=purpose,
            reason=reason,
            detail=f"why {number}\n  and how",
        )
        counted.count_retired(group, at_ms=at_ms)


def merge(
    counted: FailingGroups,
    not_trainable: NotTrainable = "",
    *,
    domain: str = "shop",
    at_ms: int = 1000,
) -> None:
    group = MergedGroup(
        group_id="g-merged",
        domain=domain,
        purpose="train",
        partition=0,
        not_trainable=not_trainable,
    )
    counted.count_merged(group, at_ms=at_ms)


def test_groups_that_fail_in_a_row_end_the_run_with_the_newest_reason_in_one_line():
    counted = failing()
    retire(counted, "failed", "expired")
    assert counted.verdict() == ""
    retire(counted, "failed")
    assert counted.verdict() == (
        "3 groups of shop failed in a row, the limit is 3 (FORGEMQ_LAUNCHER_GROUPS_FAILED_MAX); "
        "the newest, g-0, failed: why 0 and how"
    )


@pytest.mark.parametrize("reason", ["trained", "zero_variance"])
def test_a_group_that_was_played_and_graded_ends_the_row(reason: RetireReason):
    counted = failing()
    retire(counted, "failed", "failed", reason, "failed", "failed")
    assert counted.verdict() == ""


@pytest.mark.parametrize("reason", ["stale", "cancelled", "evaluated"])
def test_other_ends_count_neither_way(reason: RetireReason):
    counted = failing()
    retire(counted, "failed", "failed", reason, "failed")
    assert counted.verdict() != ""


def test_each_domain_is_counted_on_its_own():
    """A step needs groups of every domain, so a single domain that fails stops the run."""
    counted = failing()
    for _ in range(3):
        retire(counted, "failed", domain="code")
        retire(counted, "trained", domain="shop")
    assert counted.verdict().startswith("3 groups of code failed in a row")


def test_evaluation_groups_and_those_of_an_earlier_start_do_not_count():
    counted = failing(groups_max=1)
    retire(counted, "failed", purpose="eval")
    retire(counted, "failed", at_ms=999)
    assert counted.verdict() == ""


def test_a_run_that_trains_goes_on_while_two_of_three_groups_fail():
    """Groups that train retire with their whole step, long after they are merged."""
    counted = failing()
    for _ in range(20):
        retire(counted, "failed", "failed")
        merge(counted)
        assert counted.verdict() == ""
    retire(counted, "failed", "failed", "failed")
    assert counted.verdict() != ""


@pytest.mark.parametrize("reason", ["failed", "zero_variance", "evaluated"])
def test_a_group_that_merging_leaves_out_does_not_end_the_row(reason: NotTrainable):
    counted = failing()
    retire(counted, "failed", "failed")
    merge(counted, reason)
    retire(counted, "failed")
    assert counted.verdict() != ""


def test_a_merged_group_ends_the_row_of_its_own_domain_and_start_only():
    counted = failing()
    retire(counted, "failed", "failed", "failed")
    merge(counted, domain="code")
    merge(counted, domain="of_no_queue")
    merge(counted, at_ms=999)
    assert counted.verdict().startswith("3 groups of shop failed in a row")


def test_a_row_is_in_log_time_whatever_topic_is_read_first():
    counted = failing()
    merge(counted, at_ms=2000)
    retire(counted, "failed", "failed", "failed", at_ms=1999)
    assert counted.verdict() == ""
    retire(counted, "failed", "failed", "failed", at_ms=2000)
    assert counted.verdict() != ""
    merge(counted, at_ms=1999)
    assert counted.verdict() != ""


def test_without_a_limit_of_its_own_a_queue_has_three_times_its_slots():
    counted = failing(groups_max=0)
    retire(counted, *["failed"] * 5)
    assert counted.verdict() == ""
    retire(counted, "failed")
    assert counted.verdict().startswith("6 groups of shop failed in a row, the limit is 6")
