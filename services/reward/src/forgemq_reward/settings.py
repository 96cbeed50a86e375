"""Settings of the reward process; what decides a reward is in the run's configuration."""

from typing import Annotated

from msgspec import Meta, Struct


class RewardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_REWARD_*`."""

    graders: Annotated[
        int, Meta(ge=1, le=256, description="Processes that run the user's functions.")
    ] = 1
    episodes_waiting_max: Annotated[
        int, Meta(ge=1, description="Finished and not graded; above: reading pauses.")
    ] = 1024
    records_max: Annotated[int, Meta(ge=1, description="Records of one read.")] = 1000
    commit_every_s: Annotated[
        float, Meta(gt=0, le=600, description="How often the grading positions are committed.")
    ] = 5.0
