"""The pure part of the reward service: returns, advantages, and when an episode can be graded."""

from forgemq_reward.core.groups import RewardCore

__all__ = ["RewardCore"]
