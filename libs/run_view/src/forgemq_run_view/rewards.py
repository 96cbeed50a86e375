"""What the turns and episodes of a group earned, as graders and the scored group say."""

from collections.abc import Iterable

from msgspec import Struct

from forgemq_contracts.episodes import GradedEpisode
from forgemq_contracts.groups import EpisodeScore, ScoredCompletion, ScoredGroup
from forgemq_contracts.messages import Message


class TurnReward(Struct, frozen=True, kw_only=True):
    """What one completion earned; None: not said, or its group does not train."""

    process: float | None = None
    return_to_go: float | None = None
    advantage: float | None = None


class EpisodeReward(Struct, frozen=True, kw_only=True):
    """What one episode earned, and why it does not train if it does not."""

    outcome: float
    speed: float
    process: float
    total: float
    is_masked: bool
    truncated_by: str
    detail: str


class GroupRewards:
    """The rewards of one group; empty until it is graded and scored."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._grades: dict[str, GradedEpisode] = {}
        self._scores: dict[str, EpisodeScore] = {}
        self._scored: dict[str, ScoredCompletion] = {}
        self._untrained = ""
        # The first grade of an episode and the first score of a group count.
        for message in sorted(messages, key=lambda each: each.offset):
            match message.record:
                case GradedEpisode() as grade:
                    self._grades.setdefault(grade.episode_id, grade)
                case ScoredGroup() as scored if not self._scores:
                    self._scores = {score.episode_id: score for score in scored.episodes}
                    self._scored = {one.completion_id: one for one in scored.completions}
                    self._untrained = ": ".join(filter(None, (scored.not_trainable, scored.detail)))
        self._process = {
            reward.completion_id: reward.value
            for grade in self._grades.values()
            for reward in grade.process
        }

    def turn(self, completion_id: str) -> TurnReward:
        """What this completion earned."""
        scored = self._scored.get(completion_id)
        return TurnReward(
            process=self._process.get(completion_id),
            return_to_go=scored.return_to_go if scored else None,
            advantage=scored.advantage if scored else None,
        )

    def episode(self, episode_id: str) -> EpisodeReward | None:
        """What this episode earned; None until its group is scored, and for another attempt."""
        score, grade = self._scores.get(episode_id), self._grades.get(episode_id)
        if score is None:
            return None
        return EpisodeReward(
            outcome=score.outcome,
            speed=score.speed,
            process=score.process,
            total=score.total,
            is_masked=score.is_masked,
            truncated_by=score.truncated_by or "",
            detail=(grade.detail if grade else "") or self._untrained,
        )
