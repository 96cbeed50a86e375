"""The records about one group that the scheduler writes."""

from forgemq_contracts.dead_letters import DeadLetter
from forgemq_contracts.fields import DomainName
from forgemq_contracts.groups import AdmittedGroup, RequestedGroup, RetiredGroup, RetireReason
from forgemq_contracts.lanes import WeightsId
from forgemq_scheduler.core.snapshot import OpenGroup


def admitted_group(
    request: RequestedGroup, *, group: OpenGroup, weights: WeightsId
) -> AdmittedGroup:
    """The request has a slot, or needs none, while all live lanes serve at least these weights."""
    lineage, version = weights
    return AdmittedGroup(
        group_id=request.group_id,
        domain=request.domain,
        purpose=request.purpose,
        group_size=request.group_size,
        task=request.task,
        version_at_admission=version,
        lineage_at_admission=lineage,
        queue_index=group.queue_index,
        temperature=request.temperature,
        round_name=request.round_name,
    )


def retired_group(
    group: OpenGroup, *, domain: DomainName, reason: RetireReason, step: int | None, detail: str
) -> RetiredGroup:
    """The group is over."""
    return RetiredGroup(
        group_id=group.group_id,
        domain=domain,
        purpose="eval" if group.queue_index is None else "train",
        reason=reason,
        queue_index=group.queue_index,
        step=step,
        detail=detail,
    )


def failure(letter: DeadLetter) -> str:
    """Why the group of a bad record fails."""
    return f"{letter.topic} at offset {letter.offset} is no record: {letter.reason}"[:500]


def never_admitted(
    letter: DeadLetter, *, request: RequestedGroup | None, domain: DomainName
) -> RetiredGroup:
    """The group is over before it had a slot; `request` is None where it is the bad record."""
    return RetiredGroup(
        group_id=letter.group,
        domain=domain,
        purpose="train" if request is None else request.purpose,
        reason="failed",
        detail=failure(letter),
    )
