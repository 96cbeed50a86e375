"""Which record is the completion of a request, and which ids are remembered."""

from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.accounting import CompletionLedger, RetiredIds, is_candidate
from forgemq_contracts.completions import FinishedCompletion, TurnPart


def finished(request: int, reason: str = "stop", attempt: int = 0) -> FinishedCompletion:
    return FinishedCompletion(
        request_id=f"{request:032x}",
        attempt=attempt,
        episode_id="g-1.0.0",
        group_id="g-1",
        lane=0,
        epoch=0,
        finish_reason=reason,
        turn=TurnPart(sequence=0, protocol="chat_completions", body_digest=""),
    )


def test_errors_and_aborts_never_are_the_completion():
    reasons = ("stop", "length", "abort", "error")
    assert [is_candidate(finished(1, reason)) for reason in reasons] == [True, True, False, False]


def test_the_lowest_offset_that_is_no_error_is_the_completion():
    ledger = CompletionLedger()
    records = [(7, "error"), (9, "stop"), (12, "stop")]
    assert [ledger.observe(finished(1, r), offset=o) for o, r in records] == [False, True, False]


def test_seeing_the_completion_again_still_says_that_it_is_the_one():
    ledger = CompletionLedger()
    assert ledger.observe(finished(1), offset=9)
    assert ledger.observe(finished(1), offset=9)
    assert len(ledger) == 1


def test_a_forgotten_request_leaves_nothing_behind():
    ledger = CompletionLedger()
    ledger.observe(finished(1), offset=0)
    ledger.forget(f"{1:032x}")
    ledger.forget(f"{1:032x}")
    assert len(ledger) == 0
    assert ledger.observe(finished(1), offset=3), "another offset may be the completion again"


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["stop", "error", "length"]))))
def test_one_record_counts_for_each_request_that_ever_finished(records):
    ledger = CompletionLedger()
    counted = [
        r for o, (r, why) in enumerate(records) if ledger.observe(finished(r, why), offset=o)
    ]
    assert sorted(counted) == sorted({r for r, why in records if why != "error"})


def test_retired_ids_forget_the_oldest_beyond_their_limit():
    ids = RetiredIds(ids_max=3)
    for name in ("a", "b", "a", "c", "d"):
        ids.add(name)
    assert [name in ids for name in "abcd"] == [False, True, True, True]
    assert len(ids) == 3


@given(st.lists(st.text(max_size=5)))
def test_retired_ids_come_back_from_their_bytes_in_the_same_order(names):
    ids, restored = RetiredIds(ids_max=4), RetiredIds(ids_max=4)
    for name in names:
        ids.add(name)
    restored.restore(ids.to_bytes())
    assert restored.to_bytes() == ids.to_bytes()
    assert len(ids.to_bytes()) == 8 * len(ids)
    restored.add("one more")
    ids.add("one more")
    assert restored.to_bytes() == ids.to_bytes()
