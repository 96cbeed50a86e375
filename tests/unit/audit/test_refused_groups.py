"""G1 over groups that retire and were never admitted."""

from typing import Any

import pytest

from forgemq_audit.guarantees import Ledger
from forgemq_contracts.groups import RetiredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.topics import RETIRED_GROUPS
from forgemq_run_view.report import GuaranteeVerdict

CONFIGURATION = RunConfiguration(
    run="r",
    seed=0,
    model=Model(path="model"),
    queues=(Queue(domain="d", task_source="", agent=""),),
    trainer=Trainer(steps=1),
)


def first_guarantee(**changes: Any) -> GuaranteeVerdict:
    fields = {"group_id": "g-1", "domain": "d", "purpose": "train", "reason": "failed"}
    ledger = Ledger(CONFIGURATION)
    ledger.apply(
        Message(
            topic=RETIRED_GROUPS.name,
            partition=0,
            offset=0,
            timestamp_ms=0,
            record=RetiredGroup(**(fields | changes)),
        )
    )
    return ledger.verdicts(is_ended=True)[0]


def test_a_request_that_does_not_decode_may_fail_a_group_without_a_place():
    verdict = first_guarantee()
    assert (verdict.holds, verdict.violations) == (True, ())


def test_a_group_that_ended_without_a_slot_is_not_counted_among_the_retired():
    checked = "0 groups admitted, 0 retired, 0 open; 1 ended without a slot"
    assert first_guarantee().checked == checked


@pytest.mark.parametrize("changes", [{"queue_index": 3}, {"reason": "expired"}])
def test_every_other_end_needs_an_admission(changes: dict[str, Any]):
    verdict = first_guarantee(**changes)
    assert verdict.violations == ("g-1 was retired and never admitted",)
