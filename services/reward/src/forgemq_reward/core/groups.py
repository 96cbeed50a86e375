"""Scores a group once it is complete; one core per group partition."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from forgemq_contracts import topics
from forgemq_contracts.accounting import RetiredIds
from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode
from forgemq_contracts.groups import EpisodeScore, NotTrainable, RetiredGroup, ScoredGroup
from forgemq_contracts.messages import Event, InvalidRecordError, Output, Tick
from forgemq_contracts.run import Rewards
from forgemq_reward.core.returns import (
    given_completions,
    grade_fault,
    has_variance,
    return_of,
    score_of,
    scored_completions,
    shuffled,
)

CAUSE_CHARACTERS_MAX = 300
"""Of an agent's or grader's error, quoted in the detail of a failed group; a line or two."""

NOTHING_TRAINS = "every scored episode was truncated, and rewards.truncated is no_loss"

NOTHING_SAMPLED = (
    "no scored episode has a completion: their agent asked the gateway for none, or was refused"
)

_NO_DOMAINS: Mapping[str, Rewards] = MappingProxyType({})


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """An unscored group: the first end of each index, the first grade of each episode."""

    group_id: str
    episodes: tuple[FinishedEpisode, ...] = ()  # by index
    grades: tuple[GradedEpisode, ...] = ()  # by episode id


class RewardSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All state of one partition."""

    open: tuple[GroupState, ...]
    scored: tuple[str, ...]
    retired: bytes


class RewardCore:
    """Collects a group's G finished episodes and their grades, then scores the group once.

    Example with G=2 and outcomes only: episode 0 finishes and is graded 1.0, episode 1 is graded
    0.0 and then finishes: advantages are 0.5 and -0.5. RetiredGroup frees the memory.
    """

    def __init__(
        self,
        *,
        partition: int,
        rewards: Rewards,
        by_domain: Mapping[str, Rewards] = _NO_DOMAINS,
        has_teacher: bool = False,
    ) -> None:
        """Start without groups.

        Args:
            partition: Of its outputs.
            rewards: How groups are scored.
            by_domain: The same, of domains with settings of their own.
            has_teacher: Groups of equal returns train too: a teacher has more to say than rewards.
        """
        self._has_teacher = has_teacher
        self._partition = partition
        self._rewards = rewards
        self._by_domain = by_domain
        self._open: dict[str, GroupState] = {}
        self._scored: set[str] = set()  # not retired
        self._retired = RetiredIds()

    def handle(self, event: Event) -> Sequence[Output]:
        """Consume one event; return what to write."""
        if isinstance(event, Tick):
            return ()
        match event.record:
            case FinishedEpisode() as episode:
                return self._on_finished(episode)
            case GradedEpisode() as grade:
                return self._on_graded(grade)
            case RetiredGroup() as retired:
                self._open.pop(retired.group_id, None)
                self._scored.discard(retired.group_id)
                self._retired.add(retired.group_id)
                return ()
            case record:
                raise InvalidRecordError(f"reward takes no {type(record).__name__}")

    def snapshot(self) -> bytes:
        """All state; equal states give equal bytes."""
        return _ENCODER.encode(
            RewardSnapshot(
                open=tuple(self._open[group_id] for group_id in sorted(self._open)),
                scored=tuple(sorted(self._scored)),
                retired=self._retired.to_bytes(),
            )
        )

    def restore(self, snapshot: bytes) -> None:
        """Replace all state with an earlier `snapshot()`."""
        state = _DECODER.decode(snapshot)
        self._open = {group.group_id: group for group in state.open}
        self._scored = set(state.scored)
        self._retired.restore(state.retired)

    def _on_finished(self, episode: FinishedEpisode) -> Sequence[Output]:
        group = self._group(episode.group_id)
        if group is None or any(known.index == episode.index for known in group.episodes):
            return ()
        if episode.index >= episode.group_size:
            raise InvalidRecordError(
                f"{episode.episode_id} has index {episode.index} in a group of {episode.group_size}"
            )
        if group.episodes and group.episodes[0].group_size != episode.group_size:
            raise InvalidRecordError(
                f"{episode.episode_id} says G={episode.group_size}, "
                f"its group says G={group.episodes[0].group_size}"
            )
        # Only graders need task and result; an open group should not hold G copies of them.
        kept = msgspec.structs.replace(episode, task=b"", result=b"", rewards=())
        episodes = tuple(sorted((*group.episodes, kept), key=lambda known: known.index))
        return self._keep(msgspec.structs.replace(group, episodes=episodes))

    def _on_graded(self, grade: GradedEpisode) -> Sequence[Output]:
        group = self._group(grade.group_id)
        if group is None or any(known.episode_id == grade.episode_id for known in group.grades):
            return ()
        grades = tuple(sorted((*group.grades, grade), key=lambda known: known.episode_id))
        return self._keep(msgspec.structs.replace(group, grades=grades))

    def _group(self, group_id: str) -> GroupState | None:
        """The state of the group, new if it is unknown; None if it is scored or retired."""
        if group_id in self._scored or group_id in self._retired:
            return None
        return self._open.get(group_id) or GroupState(group_id=group_id)

    def _keep(self, group: GroupState) -> Sequence[Output]:
        """Keep the group, or score it if it is complete."""
        if not _is_complete(group):
            self._open[group.group_id] = group
            return ()
        self._open.pop(group.group_id, None)
        self._scored.add(group.group_id)
        domain = group.episodes[0].domain
        settings = self._by_domain.get(domain, self._rewards)
        scored = scored_group(group, settings=settings, has_teacher=self._has_teacher)
        return (Output(topic=topics.SCORED_GROUPS.name, partition=self._partition, record=scored),)

    def _check(self) -> None:
        """Assert the invariants; the simulation calls it after every event."""
        assert not self._open.keys() & self._scored, "a scored group is not open"
        over = (*self._open, *self._scored)
        assert not any(group_id in self._retired for group_id in over), "retired and kept"
        for group in self._open.values():
            assert not _is_complete(group), "complete groups are scored at once"


def scored_group(group: GroupState, *, settings: Rewards, has_teacher: bool = False) -> ScoredGroup:
    """The ScoredGroup of a complete group; with a teacher also equal returns train."""
    grades = {grade.episode_id: grade for grade in group.grades}
    scores = tuple(
        score_of(episode, grades.get(episode.episode_id), settings=settings)
        for episode in group.episodes
    )
    first = group.episodes[0]
    scored = ScoredGroup(
        group_id=group.group_id,
        domain=first.domain,
        purpose=first.purpose,
        episodes=scores,
        temperature=first.temperature,
        round_name=first.round_name,
    )
    if first.purpose == "eval":
        return _untrainable(scored, "evaluated")
    if first.source == "import":
        return _supervised(scored, group, settings=settings)
    needed = max(2.0, settings.group_min_fraction * first.group_size)
    unmasked = _unmasked(scores)
    if len(unmasked) < needed:
        detail = f"{len(unmasked)} of {first.group_size} episodes scored, {needed:g} are needed"
        detail += _first_cause(group, grades, settings=settings)
        return _untrainable(scored, "failed", detail=detail)
    if not any(group.episodes[index].manifest for index in unmasked):
        return _untrainable(scored, "failed", detail=NOTHING_SAMPLED)
    returns = [
        return_of(
            group.episodes[index],
            grades[group.episodes[index].episode_id],
            settings=settings,
        )
        for index in unmasked
    ]
    if settings.shuffle_returns:
        returns = shuffled(returns, group_id=group.group_id)
    completions = scored_completions(returns, settings=settings)
    if not (completions and has_teacher) and not has_variance(completions, settings=settings):
        is_left_out = not completions and any(not one.is_trained for one in returns)
        detail = NOTHING_TRAINS if is_left_out else ""
        return _untrainable(scored, "zero_variance", detail=detail)
    return msgspec.structs.replace(scored, completions=completions)


def _supervised(scored: ScoredGroup, group: GroupState, *, settings: Rewards) -> ScoredGroup:
    """A finished conversation that trains: each reply with the advantage 1, whatever it earned.

    One without an outcome is masked, as there is nothing to compare, and trains all the same.
    """
    grades = {grade.episode_id: grade for grade in group.grades}
    lost = [one for one in group.episodes if one.status != "completed"]
    if lost or not any(one.manifest for one in group.episodes):
        cause = _first_cause(group, grades, settings=settings) if lost else "; it has no reply"
        return _untrainable(scored, "failed", detail=f"the conversation was not read{cause}")
    return msgspec.structs.replace(
        scored, completions=given_completions(group.episodes, scored.episodes)
    )


def _is_complete(group: GroupState) -> bool:
    if not group.episodes or len(group.episodes) < group.episodes[0].group_size:
        return False
    graded = {grade.episode_id for grade in group.grades}
    return all(
        episode.status != "completed" or episode.episode_id in graded for episode in group.episodes
    )


def _unmasked(scores: Sequence[EpisodeScore]) -> list[int]:
    return [index for index, score in enumerate(scores) if not score.is_masked]


def _first_cause(
    group: GroupState, grades: Mapping[str, GradedEpisode], *, settings: Rewards
) -> str:
    """The reason of the first masked episode that has one, to append to a detail; else ""."""
    for episode in group.episodes:
        detail, grade = episode.detail, grades.get(episode.episode_id)
        if not detail and grade is not None:
            fault = grade_fault(episode, grade, settings=settings)
            detail = grade.detail if grade.is_masked else fault
        if episode.truncated_by is not None and settings.truncated == "mask":
            detail = f"truncated by {episode.truncated_by}, which rewards.truncated masks"
        if detail:
            return f"; {episode.episode_id}: {detail[:CAUSE_CHARACTERS_MAX]}"
    return ""


def _untrainable(scored: ScoredGroup, reason: NotTrainable, *, detail: str = "") -> ScoredGroup:
    return msgspec.structs.replace(scored, not_trainable=reason, detail=detail)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RewardSnapshot)
