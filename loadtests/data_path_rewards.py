"""The reward function of the data path's load test: what the agent reported."""

from forgemq_contracts.grading import GradingEpisode


def outcome(episode: GradingEpisode) -> float:
    """The value of the reward `passed`; it differs between the episodes of a group."""
    return next(reward.value for reward in episode.rewards if reward.name == "passed")
