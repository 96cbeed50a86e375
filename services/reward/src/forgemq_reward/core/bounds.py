"""Which rewards can enter the arithmetic of advantages: a grade may hold any finite float64."""

from forgemq_contracts.fields import REWARD_SIZE_MAX


def reward_fault(name: str, value: float) -> str:
    """Why this value is no reward; '' where it is one. NaN is none."""
    if abs(value) <= REWARD_SIZE_MAX:
        return ""
    return f"{name} must be from -{REWARD_SIZE_MAX:g} to {REWARD_SIZE_MAX:g}, got {value}"
