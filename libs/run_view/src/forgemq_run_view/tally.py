"""Running sums of reward parts."""

from dataclasses import dataclass

from forgemq_contracts.curriculum import SOLVED_OUTCOME_MIN
from forgemq_contracts.groups import EpisodeScore
from forgemq_run_view.state import Tally


@dataclass(slots=True)
class Sums:
    """Sums of reward parts; masked episodes do not count."""

    episodes: int = 0
    successes: int = 0
    reward: float = 0.0
    outcome: float = 0.0
    speed: float = 0.0
    process: float = 0.0

    def add(self, score: EpisodeScore) -> None:
        """Count one episode."""
        if score.is_masked:
            return
        self.episodes += 1
        self.successes += score.outcome >= SOLVED_OUTCOME_MIN
        self.reward += score.total
        self.outcome += score.outcome
        self.speed += score.speed
        self.process += score.process

    def tally(self) -> Tally:
        """Means over the episodes counted; zeros if there are none."""
        count = max(1, self.episodes)
        return Tally(
            episodes=self.episodes,
            success=self.successes / count,
            reward=self.reward / count,
            outcome=self.outcome / count,
            speed=self.speed / count,
            process=self.process / count,
        )
