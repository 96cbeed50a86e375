"""What a queue may set for its domain in place of the run; None: the field is as the run has it."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class DomainRewards(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Fields of `[rewards]`, for one domain."""

    alpha: float | None = None
    beta: float | None = None
    baseline: Literal["mean", "leave_one_out"] | None = None
    advantage_scale: Literal["none", "group_std"] | None = None
    discount: Annotated[float, Meta(gt=0, le=1)] | None = None
    group_min_fraction: Annotated[float, Meta(gt=0, le=1)] | None = None
    truncated: Literal["grade", "zero", "mask", "no_loss"] | None = None


class DomainSampling(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Fields of `[episodes.sampling]`, for one domain."""

    temperature: Annotated[float, Meta(gt=0, le=10)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: tuple[str, ...] | None = None
