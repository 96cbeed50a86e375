"""Returns and advantages of one group.

r = alpha * process + beta * speed + outcome. A process reward belongs to one completion and
credits it and every one with a smaller sequence number; outcome and speed belong to the last
completion. Advantage = reward-to-go minus a baseline over the totals of the unmasked episodes.
"""

import hashlib
import math
from collections.abc import Sequence

from msgspec import Struct

from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode, ManifestEntry
from forgemq_contracts.fields import REWARD_SIZE_MAX
from forgemq_contracts.groups import EpisodeScore, ScoredCompletion
from forgemq_contracts.run import Rewards
from forgemq_reward.core.bounds import reward_fault

ADVANTAGE_MIN = 1e-6
"""A group whose advantages are all smaller by size is not trained: its gradient is rounding."""


class EpisodeReturn(Struct, frozen=True, kw_only=True):
    """One unmasked episode: its completions by sequence, and the reward that each one earned."""

    index: int
    entries: tuple[ManifestEntry, ...]
    rewards: tuple[float, ...]
    total: float

    def to_go(self) -> list[float]:
        """Reward from each completion to the episode's end."""
        values: list[float] = []
        rest = 0.0
        for reward in reversed(self.rewards):
            rest += reward
            values.append(rest)
        return values[::-1]


def score_of(
    episode: FinishedEpisode, grade: GradedEpisode | None, *, settings: Rewards
) -> EpisodeScore:
    """The score of an episode; masked if it has no honest number."""
    masked = EpisodeScore(
        episode_id=episode.episode_id,
        outcome=0.0,
        speed=0.0,
        process=0.0,
        total=0.0,
        is_masked=True,
        metrics=grade.metrics if grade is not None else (),
    )
    if episode.status != "completed" or grade is None or grade.is_masked:
        return masked
    if grade_fault(episode, grade, settings=settings):
        return masked
    process = math.fsum(reward.value for reward in grade.process)
    return EpisodeScore(
        episode_id=episode.episode_id,
        outcome=grade.outcome,
        speed=grade.speed,
        process=process,
        total=settings.alpha * process + settings.beta * grade.speed + grade.outcome,
        metrics=grade.metrics,
    )


def grade_fault(episode: FinishedEpisode, grade: GradedEpisode, *, settings: Rewards) -> str:
    """Why this grade gives no return; "" if it gives one."""
    known = {entry.completion_id for entry in episode.manifest}
    for reward in grade.process:
        if reward.completion_id not in known:
            return f"a reward names completion {reward.completion_id}, which did not count"
    parts = [("the outcome", grade.outcome), ("the speed", grade.speed)]
    parts += [(f"the process reward of {r.completion_id}", r.value) for r in grade.process]
    for name, value in parts:
        if fault := reward_fault(name, value):
            return fault
    # By size: rewards of both signs may cancel in the total and still overflow on the way.
    sizes = math.fsum(abs(reward.value) for reward in grade.process)
    size = abs(settings.alpha) * sizes + abs(settings.beta * grade.speed) + abs(grade.outcome)
    if size <= REWARD_SIZE_MAX:
        return ""
    return (
        f"the sizes of alpha * process, beta * speed and outcome must add up to at most "
        f"{REWARD_SIZE_MAX:g}, got {size}"
    )


def return_of(
    episode: FinishedEpisode, grade: GradedEpisode, *, score: EpisodeScore, settings: Rewards
) -> EpisodeReturn:
    """The reward that each completion of an unmasked episode earned."""
    entries = tuple(sorted(episode.manifest, key=lambda entry: entry.sequence))
    earned = dict.fromkeys((entry.completion_id for entry in entries), 0.0)
    for reward in grade.process:
        earned[reward.completion_id] += settings.alpha * reward.value
    rewards = list(earned.values())
    if rewards:
        rewards[-1] += settings.beta * grade.speed + grade.outcome
    return EpisodeReturn(
        index=episode.index, entries=entries, rewards=tuple(rewards), total=score.total
    )


def shuffled(returns: Sequence[EpisodeReturn], *, group_id: str) -> list[EpisodeReturn]:
    """The control experiment: permute the group's totals by a keyed hash; paid at the end."""

    def order(episode: EpisodeReturn) -> bytes:
        text = f"{group_id}\0{episode.index}".encode()
        return hashlib.blake2b(text, digest_size=16, person=b"shuffle-returns").digest()

    pairs = zip(returns, sorted(returns, key=order), strict=True)
    return [
        EpisodeReturn(
            index=own.index,
            entries=own.entries,
            rewards=(0.0,) * (len(own.entries) - 1) + (other.total,) * bool(own.entries),
            total=other.total,
        )
        for own, other in pairs
    ]


def baselines(totals: Sequence[float], *, settings: Rewards) -> list[float]:
    """The baseline of each episode; `leave_one_out` needs at least two totals."""
    everything = math.fsum(totals)
    if settings.baseline == "mean":
        return [everything / len(totals)] * len(totals)
    return [(everything - total) / (len(totals) - 1) for total in totals]


def scored_completions(
    returns: Sequence[EpisodeReturn], *, settings: Rewards
) -> tuple[ScoredCompletion, ...]:
    """One advantage for each completion, by episode index, then sequence."""
    compared = baselines([episode.total for episode in returns], settings=settings)
    return tuple(
        ScoredCompletion(
            completion_id=entry.completion_id,
            offset=entry.offset,
            episode_index=episode.index,
            sequence=entry.sequence,
            return_to_go=to_go,
            advantage=to_go - baseline,
            parent_id=entry.parent_id,
        )
        for episode, baseline in zip(returns, compared, strict=True)
        for entry, to_go in zip(episode.entries, episode.to_go(), strict=True)
    )


def has_variance(completions: Sequence[ScoredCompletion]) -> bool:
    """Whether any advantage is at least ADVANTAGE_MIN by size."""
    return any(abs(completion.advantage) >= ADVANTAGE_MIN for completion in completions)
