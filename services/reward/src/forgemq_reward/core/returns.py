"""Returns and advantages of one group.

r = alpha * process + beta * speed + outcome. A process reward belongs to one completion and
credits it and every one with a smaller sequence number; outcome and speed belong to the episode's
end and credit all of its completions. The return from turn t on of an episode is

    to_go(t) = beta * speed + outcome + sum of alpha * process over the turns from t on,

which beyond its last turn is the first part alone. With a discount below 1, what is earned at a
later turn counts discount times less for each turn before it; the end belongs to the last turn. The
advantage of turn t is to_go(t) minus the group's mean of to_go(t) over the unmasked episodes that
have a turn. What an episode earned before t is in neither, so equal episodes have advantages of
zero whatever they earned on the way.

Sources: reward-to-go with a baseline, "The MiniMax-M2 Series", arXiv 2605.26494, section 6; the
paper's baseline B_i is not published. Division by the group's standard deviation: GRPO, arXiv
2402.03300 section 4.1.2. It gives groups of nearly equal returns as large a part in the step as
others, a bias that Dr. GRPO removes, arXiv 2503.20783 section 3.1.
"""

import hashlib
import math
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode, ManifestEntry
from forgemq_contracts.fields import REWARD_SIZE_MAX
from forgemq_contracts.groups import EpisodeScore, ScoredCompletion
from forgemq_contracts.run import Rewards
from forgemq_reward.core.bounds import reward_fault

ADVANTAGE_MIN = 1e-6
"""A group whose advantages are all smaller by size is not trained: its gradient is rounding."""

ADVANTAGE_MIN_SHARE = 1e-12
"""Of the group's largest return, for the same reason: the mean of equal returns of 1e11 differs
from them by 1e-5, float64's rounding."""


class EpisodeReturn(Struct, frozen=True, kw_only=True):
    """One unmasked episode: its completions by sequence, and what they and its end earned.

    Attributes:
        process: alpha * process reward of each completion.
        final: beta * speed + outcome.
        discount: Of later turns, above 0 and at most 1.
        is_trained: False if its completions are compared with the others', and give no loss: the
            overlong filter of DAPO, arXiv 2503.14476 section 3.4.
    """

    index: int
    entries: tuple[ManifestEntry, ...]
    process: tuple[float, ...]
    final: float
    discount: float = 1.0
    is_trained: bool = True

    def to_go(self, turns: int) -> list[float]:
        """Return from each of the first `turns` turns on; `final` beyond the episode's last one."""
        rest = self.final
        values = [rest] * max(0, turns - len(self.process))
        for reward in reversed(self.process):
            rest += reward
            values.append(rest)
            rest *= self.discount
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
        truncated_by=episode.truncated_by,
    )
    if episode.status != "completed" or grade is None:
        return masked
    grade = treated(episode, grade, settings=settings)
    if grade.is_masked or grade_fault(episode, grade, settings=settings):
        return masked
    process = math.fsum(reward.value for reward in grade.process)
    return EpisodeScore(
        episode_id=episode.episode_id,
        outcome=grade.outcome,
        speed=grade.speed,
        process=process,
        total=settings.alpha * process + settings.beta * grade.speed + grade.outcome,
        metrics=grade.metrics,
        truncated_by=episode.truncated_by,
    )


def treated(episode: FinishedEpisode, grade: GradedEpisode, *, settings: Rewards) -> GradedEpisode:
    """The grade as `rewards.truncated` wants it, if a limit ended the episode.

    A zero holds even if the grade is masked: the policy cannot escape it by an ending that its
    grader cannot read.
    """
    if is_graded(episode, settings=settings):
        return grade
    is_masked = settings.truncated == "mask"
    return msgspec.structs.replace(grade, outcome=0.0, speed=0.0, process=(), is_masked=is_masked)


def is_graded(episode: FinishedEpisode, *, settings: Rewards) -> bool:
    """Whether the reward functions say what the episode earns.

    A mask is for training alone: an evaluation that left out what the policy did not finish would
    show a success that no task had.
    """
    if episode.truncated_by is None or settings.truncated in ("grade", "no_loss"):
        return True
    return settings.truncated == "mask" and episode.purpose == "eval"


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
    episode: FinishedEpisode, grade: GradedEpisode, *, settings: Rewards
) -> EpisodeReturn:
    """The reward that each completion of an unmasked episode earned."""
    grade = treated(episode, grade, settings=settings)
    entries = tuple(sorted(episode.manifest, key=lambda entry: entry.sequence))
    earned = dict.fromkeys((entry.completion_id for entry in entries), 0.0)
    for reward in grade.process:
        earned[reward.completion_id] += settings.alpha * reward.value
    return EpisodeReturn(
        index=episode.index,
        entries=entries,
        process=tuple(earned.values()),
        final=settings.beta * grade.speed + grade.outcome,
        discount=settings.discount,
        is_trained=episode.truncated_by is None or settings.truncated != "no_loss",
    )


def shuffled(returns: Sequence[EpisodeReturn], *, group_id: str) -> list[EpisodeReturn]:
    """The control experiment: permute the group's totals by a keyed hash; paid at the end."""

    def order(episode: EpisodeReturn) -> bytes:
        text = f"{group_id}\0{episode.index}".encode()
        return hashlib.blake2b(text, digest_size=16, person=b"shuffle-returns").digest()

    totals = [math.fsum((*one.process, one.final)) for one in sorted(returns, key=order)]
    return [
        EpisodeReturn(
            index=own.index,
            entries=own.entries,
            process=(0.0,) * len(own.process),
            final=total,
            discount=own.discount,
            is_trained=own.is_trained,
        )
        for own, total in zip(returns, totals, strict=True)
    ]


def baseline(own: float, everything: float, *, count: int, settings: Rewards) -> float:
    """What a return is compared with: the mean of `count` returns that add up to `everything`.

    leave_one_out leaves `own` out of it.
    """
    if settings.baseline == "mean" or count == 1:
        return everything / count
    return (everything - own) / (count - 1)


def scale(returns: Sequence[float], *, settings: Rewards) -> float:
    """What an advantage is multiplied by, given the returns it was compared with.

    group_std: 1 / their standard deviation (that of a sample, with n - 1, as verl and TRL have it);
    0 if that is no more than the rounding of the returns.
    """
    if settings.advantage_scale == "none":
        return 1.0
    if len(returns) < 2:
        return 0.0
    mean = math.fsum(returns) / len(returns)
    squares = math.fsum((value - mean) ** 2 for value in returns)
    deviation = math.sqrt(squares / (len(returns) - 1))
    return 0.0 if deviation < _rounding(returns) else 1.0 / deviation


def scored_completions(
    returns: Sequence[EpisodeReturn], *, settings: Rewards
) -> tuple[ScoredCompletion, ...]:
    """One advantage for each completion that trains, by episode index, then sequence.

    Turns of different episodes are compared by their order in the episode, the first with the
    first. An episode without a completion earned nothing by sampling and is compared with nobody.
    """
    compared = [episode for episode in returns if episode.entries]
    turns = max((len(episode.entries) for episode in compared), default=0)
    to_go = [episode.to_go(turns) for episode in compared]
    columns = list(zip(*to_go, strict=True))
    sums = [math.fsum(column) for column in columns]
    scales = [scale(column, settings=settings) for column in columns]
    return tuple(
        ScoredCompletion(
            completion_id=entry.completion_id,
            offset=entry.offset,
            episode_index=episode.index,
            sequence=entry.sequence,
            return_to_go=own[turn],
            advantage=scales[turn]
            * (own[turn] - baseline(own[turn], sums[turn], count=len(compared), settings=settings)),
            parent_id=entry.parent_id,
        )
        for episode, own in zip(compared, to_go, strict=True)
        if episode.is_trained
        for turn, entry in enumerate(episode.entries)
    )


def given_completions(
    episodes: Sequence[FinishedEpisode], scores: Sequence[EpisodeScore]
) -> tuple[ScoredCompletion, ...]:
    """The replies of finished conversations, by episode index, then sequence.

    The advantage of 1 is the factor of the supervised loss; the return is what was reported.
    """
    return tuple(
        ScoredCompletion(
            completion_id=entry.completion_id,
            offset=entry.offset,
            episode_index=episode.index,
            sequence=entry.sequence,
            return_to_go=score.total,
            advantage=1.0,
            parent_id=entry.parent_id,
        )
        for episode, score in zip(episodes, scores, strict=True)
        for entry in sorted(episode.manifest, key=lambda entry: entry.sequence)
    )


def has_variance(completions: Sequence[ScoredCompletion], *, settings: Rewards) -> bool:
    """Whether any advantage is, by size, more than the rounding of what was subtracted."""
    if settings.advantage_scale == "group_std":
        # `scale` has made a zero of what is rounding; what is left is no difference of returns.
        return any(completion.advantage for completion in completions)
    least = _rounding([completion.return_to_go for completion in completions])
    return any(abs(completion.advantage) >= least for completion in completions)


def _rounding(returns: Sequence[float]) -> float:
    """Differences of these returns that are smaller say nothing."""
    largest = max((abs(value) for value in returns), default=0.0)
    return max(ADVANTAGE_MIN, ADVANTAGE_MIN_SHARE * largest)
