"""When an engine ends a completion that repeats itself."""

from typing import Annotated

from msgspec import Meta, Struct


class RepetitionStop(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Generation ends once so many tokens in a row were each nearly certain; off by default.

    Source: MiniMax-M1, arXiv 2506.13585 section 3.2: 3,000 tokens, each above 0.99. A loop is
    recognised by its certainty, as its text may vary.
    """

    tokens: Annotated[
        int, Meta(ge=0, description="In a row, of one completion; 0: never. M1 took 3000.")
    ] = 0
    probability: Annotated[
        float,
        Meta(gt=0, lt=1, description="Each token's, as it was sampled, is above this."),
    ] = 0.99
