"""Settings of the reward process; what decides a reward is in the run's configuration."""

from typing import Annotated

from msgspec import Meta, Struct


class RewardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_REWARD_*`."""

    graders: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="Processes that run the user's functions, an episode each at a time; as "
            "many again, for many episodes at once, if a queue has an async function. 0: one for "
            "each core that this process may use, 2 to 16.",
        ),
    ] = 0
    gradings_max: Annotated[
        int, Meta(ge=1, le=4096, description="Async gradings at once in a grader process.")
    ] = 256
    grading_tries_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10,
            description="Of an episode whose grader process is lost; then the episode is masked.",
        ),
    ] = 3
    episodes_waiting_max: Annotated[
        int, Meta(ge=1, description="Finished and not graded; above: reading pauses.")
    ] = 1024
    records_max: Annotated[int, Meta(ge=1, description="Records of one read.")] = 1000
    commit_every_s: Annotated[
        float, Meta(gt=0, le=600, description="How often the grading positions are committed.")
    ] = 5.0


def grader_count(settings: RewardSettings, *, cores: int) -> int:
    """How many grader processes there are.

    At least two, so that one episode whose judge is slow does not hold up all others; at most 16,
    because each has the user's modules in memory.

    Args:
        settings: May name the number.
        cores: That this process may use.
    """
    return settings.graders or max(2, min(16, cores))
