"""On-policy distillation: a teacher says how likely it would have sampled the policy's tokens."""

from typing import Annotated

from msgspec import Meta, Struct


class Distillation(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A teacher's engine, and how much its log-probabilities count beside the rewards.

    Source: Thinking Machines, "On-Policy Distillation", 2025, after GKD, arXiv 2306.13649, and
    MiniLLM, arXiv 2306.08543.
    """

    url: Annotated[
        str,
        Meta(
            pattern=r"^https?://[^\s/]+(/[^\s]*)?$",
            description="Of an SGLang server with the teacher; its tokens are the policy's.",
        ),
    ]
    weight: Annotated[
        float,
        Meta(gt=0, description="Of log p teacher - log p policy in each token's advantage."),
    ] = 1.0
    reward_weight: Annotated[
        float, Meta(ge=0, description="Of the advantage from rewards; 0: the teacher alone.")
    ] = 1.0
    timeout_s: Annotated[
        float, Meta(gt=0, description="For one answer of the teacher; it is asked three times.")
    ] = 60.0
