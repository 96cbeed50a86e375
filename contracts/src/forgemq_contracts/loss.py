"""The loss of a run: its kind, what it is compared with, and what it is divided by."""

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

LOSS_KINDS = ("cispo", "truncated_is", "ppo_clip", "gspo", "icepop")
_LOSS_KIND = re.compile(rf"({'|'.join(LOSS_KINDS)}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)")


class Loss(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


def check_loss(loss: Loss) -> None:
    """Refuse fields that cannot work together.

    Raises:
        ValueError: Names the field and the rule.
    """
    if loss.clip_dual <= 1:
        raise ValueError(
            "loss.clip_dual must be above 1: at 1 an entry of ratio 1 is limited already, "
            f"got {loss.clip_dual:g}"
        )
    if not _LOSS_KIND.fullmatch(loss.kind):
        raise ValueError(
            f"loss.kind must be one of {', '.join(LOSS_KINDS)} or module:function, "
            f"got {loss.kind!r}"
        )
    if loss.group_tokens is not None and loss.normalisation != "step":
        raise ValueError(
            "loss.group_tokens must be left out if loss.normalisation is given: each says what the "
            f"losses are divided by, got {loss.group_tokens} and {loss.normalisation!r}"
        )
