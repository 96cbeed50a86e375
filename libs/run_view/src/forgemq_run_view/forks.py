"""Why requests did not extend what their episodes had recorded: a count and a share by reason."""

from collections import Counter
from collections.abc import Mapping

from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.fields import ForkReason
from forgemq_run_view.state import ForkTotal

MEANINGS: Mapping[ForkReason, str] = {
    "side_request": "another conversation with the same key, such as one that makes a title",
    "compaction": "the agent left earlier turns out, or put a summary in their place",
    "edited": "the agent changed an earlier message, or the policy's reply in it",
    "other_tools": "the agent offered other tools than in the turn before",
    "resampled": "the agent asked again for the reply to the same messages",
    "rewritten": "the model's chat template writes earlier messages in another way",
}
"""What each reason means, in one line for people."""


class ForkBook:
    """Forks of the episodes of a run.

    Example: of two episodes, one with 3 forks by compaction, the table has one row:
    `compaction`, 3 forks, in 1 episode, a share of 0.5.
    """

    def __init__(self) -> None:
        self._forks: Counter[ForkReason] = Counter()
        self._episodes: Counter[ForkReason] = Counter()

    def add(self, episode: FinishedEpisode) -> None:
        """Count the forks of an episode; the caller adds each episode once."""
        for fork in episode.fork_reasons:
            self._forks[fork.reason] += fork.count
            self._episodes[fork.reason] += 1

    def totals(self, *, episodes_finished: int) -> tuple[ForkTotal, ...]:
        """One row for each reason that there was, the most frequent first."""
        ordered = sorted(self._forks.items(), key=lambda each: (-each[1], each[0]))
        return tuple(
            ForkTotal(
                reason=reason,
                forks=forks,
                episodes=self._episodes[reason],
                episodes_share=self._episodes[reason] / episodes_finished,
                meaning=MEANINGS[reason],
            )
            for reason, forks in ordered
        )
