"""How many optimizer updates a step takes, and over which of its groups."""

from typing import Annotated

from msgspec import Meta, Struct


class Updates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Optimizer updates of one step; one over all of its groups by default.

    A step of several updates still makes one version: engines, staleness and records see steps.
    """

    minibatches: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Into how many parts a step's groups are dealt, with one update for each; "
            "a step of fewer groups has as many as groups. MiniMax-M1 took 16.",
        ),
    ] = 1
    passes: Annotated[
        int, Meta(ge=1, le=16, description="How often a step trains each of its groups.")
    ] = 1
