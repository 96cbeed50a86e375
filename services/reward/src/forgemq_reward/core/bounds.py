"""The bound on rewards: advantages are trained in float32, a grade may hold any float64."""

from forgemq_contracts.fields import REWARD_SIZE_MAX


def reward_fault(name: str, value: float) -> str:
    """Why this value cannot be a reward, as NaN cannot; "" if it can."""
    if abs(value) <= REWARD_SIZE_MAX:
        return ""
    return f"{name} must be from -{REWARD_SIZE_MAX:g} to {REWARD_SIZE_MAX:g}, got {value}"
