"""A row of a file of episodes: one episode with all its turns, made of its group's records."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import EpisodeStatus, FinishedEpisode, ForkCount, GradedEpisode
from forgemq_contracts.fields import NamedValue, Purpose, Source, TruncationCause
from forgemq_contracts.groups import EpisodeScore, NotTrainable, ScoredCompletion, ScoredGroup
from forgemq_contracts.recorded_turns import RecordedTurn
from forgemq_contracts.turn_reading import parses_tools
from forgemq_episode_files.conversation import Message, conversation_to

Reply: TypeAlias = Callable[[FinishedCompletion, Sequence[Message]], Message]
"""The assistant's message that a completion was sent as, given the tools of its turn."""

_SCORED_APART = ("outcome", "speed")


class EpisodeRow(Struct, frozen=True, kw_only=True):
    """One episode; every field is a column.

    Attributes:
        messages: The conversation that ends with the newest turn that counts and is no side
            request, replies included; other branches follow from `turns`.
        tools: What the policy could call in that turn.
        outcome: As speed, process and total, None if the episode is masked.
        total: alpha * process + beta * speed + outcome, with the weights of the run.
        rewards: Other rewards that were reported for the whole episode, by name.
        metrics: Numbers of the episode: turns, tool calls, seconds.
        not_trainable: Why its group trains nothing; "" if it trains.
        task: JSON; None of an import, whose task is its messages.
        result: JSON; None if the agent reported nothing.
        metadata: JSON object, of an import; else None.
    """

    run: str
    group_id: str
    episode_id: str
    domain: str
    purpose: Purpose
    source: Source
    round_name: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    outcome: float | None
    speed: float | None
    process: float | None
    total: float | None
    rewards: tuple[NamedValue, ...]
    is_masked: bool
    status: EpisodeStatus
    truncated_by: TruncationCause | None
    detail: str
    not_trainable: NotTrainable
    fork_reasons: tuple[ForkCount, ...]
    metrics: tuple[NamedValue, ...]
    task: str | None
    result: str | None
    metadata: str | None
    turns: tuple[RecordedTurn, ...]


class ScoredRecords(Struct, frozen=True, kw_only=True):
    """What the log has of one scored group.

    Attributes:
        scored: The group's score.
        episodes: The scored ones, by id.
        grades: By episode id; of episodes that were graded.
        completions: By request id, those that count as the completion of their request.
    """

    scored: ScoredGroup
    episodes: Mapping[str, FinishedEpisode]
    grades: Mapping[str, GradedEpisode]
    completions: Mapping[str, FinishedCompletion]


def rows_of(records: ScoredRecords, *, run: str, reply: Reply) -> Iterator[EpisodeRow]:
    """The episodes of a group, by index.

    Raises:
        KeyError: a completion that counts, or an ancestor of one, is not among the records.
    """
    advantages = {one.completion_id: one for one in records.scored.completions}
    by_episode: dict[str, dict[str, FinishedCompletion]] = defaultdict(dict)
    for request_id, completion in records.completions.items():
        by_episode[completion.episode_id][request_id] = completion
    for score in records.scored.episodes:
        episode = records.episodes[score.episode_id]
        earned = _Earned(records.grades.get(score.episode_id), advantages)
        turns = _turns(episode, by_episode[score.episode_id], earned, reply)
        if episode.source == "import":
            # One that trains has turns of this run, whatever its file has.
            task = _imported(episode)
            turns = turns or task.turns
            yield _row(episode, score, records.scored, turns=turns, imported=task, run=run)
        else:
            yield _row(episode, score, records.scored, turns=turns, imported=None, run=run)


class ImportedTask(Struct, frozen=True):
    """The task of an imported conversation; of one that another client sent, perhaps less."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    metadata: dict[str, Any] | None = None
    turns: tuple[RecordedTurn, ...] = ()


def _imported(episode: FinishedEpisode) -> ImportedTask:
    try:
        return msgspec.json.decode(episode.task, type=ImportedTask)
    except msgspec.ValidationError:  # A task of another form: it stays a task.
        return ImportedTask(metadata={"task": msgspec.json.decode(episode.task)})


class _Earned:
    """What the completions of one episode earned."""

    def __init__(
        self, grade: GradedEpisode | None, advantages: Mapping[str, ScoredCompletion]
    ) -> None:
        self._process: dict[str, float] = {}
        for reward in grade.process if grade else ():
            before = self._process.get(reward.completion_id, 0.0)
            self._process[reward.completion_id] = before + reward.value
        self._scored = advantages

    def by(self, completion_id: str) -> dict[str, float | None]:
        scored = self._scored.get(completion_id)
        return {
            "process": self._process.get(completion_id),
            "return_to_go": scored.return_to_go if scored else None,
            "advantage": scored.advantage if scored else None,
        }


def _turns(
    episode: FinishedEpisode,
    completions: Mapping[str, FinishedCompletion],
    earned: _Earned,
    reply: Reply,
) -> tuple[RecordedTurn, ...]:
    """The turns that count, and those whose tokens or messages they continue, by sequence."""
    counted = {entry.completion_id for entry in episode.manifest}
    needed: dict[str, FinishedCompletion] = {}
    waiting = sorted(counted)
    while waiting:
        request_id = waiting.pop()
        if request_id not in needed:
            needed[request_id] = completions[request_id]
            parent_id = needed[request_id].parent_id
            waiting += [parent_id] if parent_id else []
    tools: dict[str, tuple[Message, ...]] = {}
    for one in completions.values():
        if one.turn.tools:
            tools[one.turn.tools_digest] = msgspec.json.decode(
                one.turn.tools, type=tuple[Message, ...]
            )
    ordered = sorted(needed.values(), key=lambda each: (each.turn.sequence, each.request_id))
    return tuple(
        _turn(each, tools=_tools_of(each, tools), counts=each.request_id in counted,
              earned=earned.by(each.request_id), reply=reply)
        for each in ordered
    )  # fmt: skip


def _tools_of(
    completion: FinishedCompletion, by_digest: Mapping[str, tuple[Message, ...]]
) -> tuple[Message, ...]:
    # As the gateway parsed it for the agent: without tools, call markup stays text.
    if not parses_tools(completion.turn):
        return ()
    return by_digest.get(completion.turn.tools_digest, ())


def _turn(
    completion: FinishedCompletion,
    *,
    tools: tuple[Message, ...],
    counts: bool,
    earned: Mapping[str, float | None],
    reply: Reply,
) -> RecordedTurn:
    turn = completion.turn
    versions = (s.version for s in completion.spans for _ in range(s.start, s.end))
    return RecordedTurn(
        completion_id=completion.request_id,
        sequence=turn.sequence,
        reply=reply(completion, tools),
        output_ids=completion.output,
        logprobs=completion.logprobs,
        versions=pack_ids(versions),
        context_ids=completion.context,
        parent_id=completion.parent_id,
        shared_prefix_tokens=completion.shared_prefix_tokens,
        is_fork=turn.is_fork,
        fork_reason=turn.fork_reason,
        messages=msgspec.json.decode(turn.messages, type=tuple[Message, ...]),
        tools=tools,
        counts=counts,
        temperature=completion.temperature,
        support=completion.support,
        finish_reason=completion.finish_reason,
        process=earned["process"],
        return_to_go=earned["return_to_go"],
        advantage=earned["advantage"],
        cuts=turn.cuts,
    )


def _row(
    episode: FinishedEpisode,
    score: EpisodeScore,
    scored: ScoredGroup,
    *,
    turns: tuple[RecordedTurn, ...],
    imported: ImportedTask | None,
    run: str,
) -> EpisodeRow:
    if imported is not None:
        messages, tools = imported.messages, imported.tools
    else:
        messages, tools = conversation_to(last_turn(turns), turns)
    return EpisodeRow(
        **_parts(episode, score, turns=turns),
        run=run,
        group_id=episode.group_id,
        episode_id=episode.episode_id,
        domain=episode.domain,
        purpose=episode.purpose,
        source=episode.source,
        round_name=episode.round_name,
        messages=messages,
        tools=tools,
        rewards=_other_rewards(episode),
        is_masked=score.is_masked,
        status=episode.status,
        truncated_by=episode.truncated_by,
        detail=episode.detail,
        not_trainable=scored.not_trainable,
        fork_reasons=episode.fork_reasons,
        metrics=score.metrics,
        task=None if imported is not None else episode.task.decode(),
        result=episode.result.decode() if episode.result else None,
        metadata=_json(imported.metadata) if imported is not None else None,
        turns=turns,
    )


def _parts(
    episode: FinishedEpisode, score: EpisodeScore, *, turns: Sequence[RecordedTurn]
) -> dict[str, float | None]:
    """The episode's reward by part; of an import what its file said."""
    given = [turn.process for turn in turns if turn.process is not None]
    process = math.fsum(given) if given else score.process
    values = {
        "outcome": score.outcome,
        "speed": score.speed,
        "process": process,
        "total": score.total,
    }
    if episode.source == "import":
        named = {reward.name: reward.value for reward in episode.rewards}
        return {
            "outcome": named.get("outcome"),
            "speed": named.get("speed"),
            "process": process if given else None,
            "total": None if score.is_masked else score.total,
        }
    return dict.fromkeys(values) if score.is_masked else dict(values)


def last_turn(turns: Sequence[RecordedTurn]) -> RecordedTurn | None:
    """The newest turn that counts; one of a side request only if there is no other."""
    counted = [turn for turn in turns if turn.counts]
    own = [turn for turn in counted if turn.fork_reason != "side_request"]
    return next(reversed(own or counted), None)


def _other_rewards(episode: FinishedEpisode) -> tuple[NamedValue, ...]:
    values: dict[str, float] = {}
    for reward in episode.rewards:
        if reward.completion_id is None and reward.name not in _SCORED_APART:
            values[reward.name] = values.get(reward.name, 0.0) + reward.value
    return tuple(NamedValue(name=name, value=value) for name, value in sorted(values.items()))


def _json(value: dict[str, Any] | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
