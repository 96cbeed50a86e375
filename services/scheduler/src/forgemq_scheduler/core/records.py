"""The records about one group that the scheduler writes."""

from forgemq_contracts.dead_letters import DeadLetter
from forgemq_contracts.fields import DomainName
from forgemq_contracts.groups import (
    AdmittedGroup,
    ClosedGroup,
    RequestedGroup,
    RetiredGroup,
)
from forgemq_contracts.lanes import WeightsId
from forgemq_contracts.mixture import Mixture
from forgemq_contracts.run import Queue
from forgemq_contracts.steps import ScheduledGroup, ScheduledStep
from forgemq_scheduler.core.snapshot import OpenGroup

DETAIL_MAX = 500
"""Characters of a failure's text: the reason may quote the bad record, which may be large."""


def admitted_group(
    request: RequestedGroup, *, group: OpenGroup, weights: WeightsId
) -> AdmittedGroup:
    """The record that lets a group begin.

    Args:
        request: What was asked for.
        group: Its slot; an evaluation group has none.
        weights: Lineage and version that no token of the group may be behind.
    """
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
        source=request.source,
        stage=request.stage,
    )


def closed_group(group: OpenGroup, *, settings: Queue) -> ClosedGroup:
    """The record that ends what is unfinished of a group."""
    return ClosedGroup(
        group_id=group.group_id,
        domain=settings.domain,
        purpose="eval" if group.queue_index is None else "train",
        detail=f"not finished {settings.group_deadline_s:g} s after its first claim "
        "(group_deadline_s)",
    )


def expiry(group: OpenGroup, *, settings: Queue) -> str:
    """Why a group that is past the deadline of its phase expires: names the setting."""
    if group.phase == "unclaimed":
        within_s = f"{settings.claim_deadline_s:g} s (claim_deadline_s)"
        return f"no agent claimed an episode within {within_s}"
    within_s = f"{settings.group_deadline_s:g} s (group_deadline_s)"
    return f"past its deadline, and not scored within another {within_s}"


def failure(letter: DeadLetter) -> str:
    """Why a group fails: names its bad record."""
    return f"{letter.topic} at offset {letter.offset} is no record: {letter.reason}"[:DETAIL_MAX]


def never_admitted(
    letter: DeadLetter, *, request: RequestedGroup | None, domain: DomainName
) -> RetiredGroup:
    """The record that ends a group before it had a slot.

    Args:
        letter: About its bad record.
        request: None if the bad record is the request itself.
        domain: Queue the group was for.
    """
    return RetiredGroup(
        group_id=letter.group,
        domain=domain,
        purpose="train" if request is None else request.purpose,
        reason="failed",
        detail=failure(letter),
    )


def scheduled_step(
    step: int, *, groups: tuple[ScheduledGroup, ...], mixture: Mixture, is_last: bool
) -> ScheduledStep:
    """The record that lets a step train."""
    return ScheduledStep(
        step=step,
        groups=groups,
        staleness_bound=mixture.staleness_bound_max,
        is_last=is_last,
        stage=mixture.stage(step),
    )
