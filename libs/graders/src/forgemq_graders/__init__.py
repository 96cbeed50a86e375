"""Ready process rewards: functions for the `process` of a queue, alone or added up."""

from forgemq_graders.languages import language_mixing
from forgemq_graders.process import (
    ProcessReward,
    malformed_calls,
    overlong,
    repetition,
    weighted,
)

__all__ = [
    "ProcessReward",
    "language_mixing",
    "malformed_calls",
    "overlong",
    "repetition",
    "weighted",
]
