"""The loss of a run: its kind, what it is compared with, and what it is divided by."""

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

LOSS_KINDS = ("cispo", "truncated_is", "ppo_clip", "gspo", "icepop")
_LOSS_KIND = re.compile(rf"({'|'.join(LOSS_KINDS)}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)")


ANCHORED_KINDS = ("cispo", "ppo_clip", "gspo")
"""Losses that limit how far a step goes, so that they can be anchored at its beginning. The others
correct the ratio to the behaviour itself."""


class SequenceMask(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Which completions give no loss, by the ratio policy / behaviour of all their loss tokens.

    They count in what the losses are divided by: that is fixed before the policy is read.
    """

    ratio: Annotated[
        Literal["geometric_mean", "arithmetic_mean", "product"],
        Meta(description="Of the tokens' ratios; the product is that of the whole completion."),
    ] = "geometric_mean"
    low: Annotated[float, Meta(ge=0, description="Completions below are masked.")] = 0.5
    high: Annotated[float, Meta(gt=0, description="Completions above are masked.")] = 2.0
    advantages: Annotated[
        Literal["all", "negative"],
        Meta(description="negative: completions of a positive advantage are never masked."),
    ] = "all"


class Loss(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The loss of one sampled token; CISPO by default."""

    kind: Annotated[
        str, Meta(description="cispo, truncated_is, ppo_clip, gspo, icepop, or module:function.")
    ] = "cispo"
    ratio_cap: Annotated[
        float, Meta(gt=0, description="CISPO: absolute cap on policy / behaviour.")
    ] = 5.0
    clip_low: Annotated[float, Meta(ge=0, description="ppo_clip, gspo: 1 - this.")] = 0.2
    clip_high: Annotated[float, Meta(ge=0, description="ppo_clip, gspo: 1 + this.")] = 0.2
    clip_dual: Annotated[
        float,
        Meta(gt=0, description="Above 1; ppo_clip, gspo: at A < 0 a loss is at most this * |A|."),
    ] = 3.0
    mask_low: Annotated[float, Meta(ge=0, description="icepop: ratios below are masked.")] = 0.125
    mask_high: Annotated[float, Meta(gt=0, description="icepop: ratios above are masked.")] = 8.0
    anchor: Annotated[
        Literal["behaviour", "step_start"],
        Meta(
            description="What the ratio of cispo, ppo_clip and gspo is to: the policy that sampled "
            "the token, or the policy at the beginning of the step. With step_start each loss is "
            "also multiplied by step_start / behaviour, capped at anchor_weight_cap."
        ),
    ] = "behaviour"
    anchor_weight_cap: Annotated[float, Meta(gt=0)] = 5.0
    sequence_mask: (
        Annotated[SequenceMask, Meta(description="None: no completion is masked as a whole.")]
        | None
    ) = None
    normalisation: Literal["step", "group"] = "step"
    group_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="The losses are divided by this and by the number of groups, instead "
                "of by how many entries the step has; None: as normalisation says.",
            ),
        ]
        | None
    ) = None
    reference_weight: Annotated[
        float,
        Meta(
            ge=0,
            description="Weight of a k3 KL to the model the run started from, added to the loss "
            "of each entry; above 0 the trainer keeps that model in memory too.",
        ),
    ] = 0.0


_FIELDS_OF_KINDS = {
    "ratio_cap": ("cispo", "truncated_is"),
    "clip_low": ("ppo_clip", "gspo"),
    "clip_high": ("ppo_clip", "gspo"),
    "clip_dual": ("ppo_clip", "gspo"),
    "mask_low": ("icepop",),
    "mask_high": ("icepop",),
}
"""Fields that only these losses read."""


def check_loss(loss: Loss) -> None:
    """Refuse fields that cannot work together, or that the chosen loss would not read.

    Raises:
        ValueError: Names the field and the rule.
    """
    if loss.clip_dual <= 1:
        raise ValueError(
            "loss.clip_dual must be above 1: at 1 an entry of ratio 1 is limited already, "
            f"got {loss.clip_dual:g}"
        )
    if loss.clip_low > 1:
        raise ValueError(
            "loss.clip_low must be at most 1: ratios below 1 - clip_low are limited, and none is "
            f"below 0; at 1 there is no lower limit, got {loss.clip_low:g}"
        )
    if not _LOSS_KIND.fullmatch(loss.kind):
        raise ValueError(
            f"loss.kind must be one of {', '.join(LOSS_KINDS)} or module:function, "
            f"got {loss.kind!r}"
        )
    if loss.anchor == "step_start" and loss.kind in LOSS_KINDS and loss.kind not in ANCHORED_KINDS:
        raise ValueError(
            f"loss.anchor must be behaviour if loss.kind is {loss.kind}, which corrects the ratio "
            f"to the behaviour itself; step_start is for {', '.join(ANCHORED_KINDS)} and your own"
        )
    _check_fields_are_read(loss)
    mask = loss.sequence_mask
    if mask is not None:
        _check_band("loss.sequence_mask.low", "high", low=mask.low, high=mask.high)
    if loss.kind == "icepop":
        _check_band("loss.mask_low", "mask_high", low=loss.mask_low, high=loss.mask_high)
    if loss.group_tokens is not None and loss.normalisation != "step":
        raise ValueError(
            "loss.group_tokens must be left out if loss.normalisation is given: each says what the "
            f"losses are divided by, got {loss.group_tokens} and {loss.normalisation!r}"
        )


def _check_fields_are_read(loss: Loss) -> None:
    usual = Loss()
    for field, kinds in _FIELDS_OF_KINDS.items():
        given = getattr(loss, field)
        if loss.kind not in kinds and given != getattr(usual, field):
            raise ValueError(
                f"loss.{field} must be left out if loss.kind is {loss.kind}: it is for "
                f"{' and '.join(kinds)}, got {given:g}"
            )
    if loss.anchor != "step_start" and loss.anchor_weight_cap != usual.anchor_weight_cap:
        raise ValueError(
            "loss.anchor_weight_cap must be left out if loss.anchor is not step_start, "
            f"got {loss.anchor_weight_cap:g}"
        )


def _check_band(low_field: str, high_field: str, *, low: float, high: float) -> None:
    if not low < 1 < high:
        raise ValueError(
            f"{low_field} must be below 1 and {high_field} above it: the ratio of what the newest "
            f"policy sampled is 1, and would be masked, got {low:g} and {high:g}"
        )
