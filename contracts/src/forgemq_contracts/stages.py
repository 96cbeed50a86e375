"""Stages of a run: from which step on which domains train, how much, and how hard.

The structs of `[[stages]]`. `mixture.py` says how many groups of each domain a step then has.
"""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.domain_settings import DomainSampling
from forgemq_contracts.fields import DomainName

SHARE_PARTS = 1000
"""Shares are whole thousandths, so that a float of the run file names one exact fraction, and what
a stage does repeats after at most 1000 steps."""


class StageDomain(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One domain in one stage; what it leaves out is as its queue has it."""

    domain: DomainName
    share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Of the groups of a step, in thousandths; those of a stage sum to 1.",
        ),
    ]
    difficulty: (
        Annotated[float, Meta(description="Given to the task source as `difficulty`.")] | None
    ) = None
    context_tokens_max: (
        Annotated[int, Meta(ge=2, description="At most that of the model.")] | None
    ) = None
    sampling: DomainSampling | None = None


class Stage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is mixed from one step on, until the next stage or the end of the run."""

    from_step: Annotated[int, Meta(ge=0, le=10_000_000, description="The first stage: 0.")]
    domains: Annotated[
        tuple[StageDomain, ...],
        Meta(min_length=1, description="A domain that is left out has the share 0."),
    ]


def stage_at(stages: tuple[Stage, ...], step: int) -> int | None:
    """Index of the stage that a step belongs to; None in a run without stages."""
    begun = [index for index, stage in enumerate(stages) if stage.from_step <= step]
    return begun[-1] if begun else None


def of_domain(stages: tuple[Stage, ...], stage: int | None, *, domain: str) -> StageDomain | None:
    """What a stage says of a domain; None if it says nothing, or there is no such stage."""
    if stage is None or stage >= len(stages):
        return None
    return next((each for each in stages[stage].domains if each.domain == domain), None)


def parts_of(share: float) -> int:
    """Thousandths of a share."""
    return round(share * SHARE_PARTS)
