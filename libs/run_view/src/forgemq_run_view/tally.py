"""Running sums of reward parts."""

from dataclasses import dataclass

from forgemq_contracts.curriculum import SOLVED_OUTCOME_MIN
from forgemq_contracts.groups import EpisodeScore
from forgemq_run_view.state import Tally

_ONE = 2**1074
"""Every float is a whole number of this part of one: the smallest float is one of them."""


@dataclass(slots=True)
class Sums:
    """Sums of reward parts; masked episodes do not count.

    Whole numbers of `1 / _ONE`: partitions are read in another order each time, and a sum of floats
    depends on it.
    """

    episodes: int = 0
    successes: int = 0
    reward: int = 0
    outcome: int = 0
    speed: int = 0
    process: int = 0

    def add(self, score: EpisodeScore) -> None:
        """Count one episode."""
        if score.is_masked:
            return
        self.episodes += 1
        self.successes += score.outcome >= SOLVED_OUTCOME_MIN
        self.reward += _whole(score.total)
        self.outcome += _whole(score.outcome)
        self.speed += _whole(score.speed)
        self.process += _whole(score.process)

    def tally(self) -> Tally:
        """Means over the episodes counted; zeros if there are none."""
        count = max(1, self.episodes)
        return Tally(
            episodes=self.episodes,
            success=self.successes / count,
            reward=self.reward / (count * _ONE),
            outcome=self.outcome / (count * _ONE),
            speed=self.speed / (count * _ONE),
            process=self.process / (count * _ONE),
        )


def _whole(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (_ONE // denominator)
