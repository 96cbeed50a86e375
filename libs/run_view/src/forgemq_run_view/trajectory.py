"""The turns of a group: tokens, log-probabilities, weight versions and what they earned."""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from forgemq_contracts.accounting import is_candidate
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.messages import Message
from forgemq_run_view.rewards import EpisodeReward, GroupRewards, TurnReward


class TrajectoryTurn(Struct, frozen=True, kw_only=True):
    """One completion: the tokens new in its context, and what was sampled."""

    completion_id: str
    episode_id: str
    sequence: int
    parent_id: str | None
    shared_prefix_tokens: int
    context: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    temperature: float
    support: str
    finish_reason: str
    queued_s: float
    engine_s: float
    cached_tokens: int
    messages: str
    reward: TurnReward


class ImportedMessage(Struct, frozen=True, kw_only=True):
    """One message of a conversation that was finished elsewhere."""

    role: str
    text: str


class Trajectory(Struct, frozen=True, kw_only=True):
    """One attempt at one episode, turns in order of admission; an imported one has messages."""

    episode_id: str
    turns: tuple[TrajectoryTurn, ...]
    reward: EpisodeReward | None
    messages: tuple[ImportedMessage, ...] = ()


def chosen(messages: Iterable[Message]) -> dict[str, FinishedCompletion]:
    """The completion of each request id: its lowest offset that is no error."""
    best: dict[str, tuple[int, FinishedCompletion]] = {}
    for message in messages:
        record = message.record
        if not isinstance(record, FinishedCompletion) or not is_candidate(record):
            continue
        known = best.get(record.request_id)
        if known is None or message.offset < known[0]:
            best[record.request_id] = (message.offset, record)
    return {request_id: record for request_id, (_, record) in best.items()}


def context_bytes(
    completion: FinishedCompletion, completions: Mapping[str, FinishedCompletion]
) -> bytes:
    """The whole context of a completion as int32 bytes, rebuilt through its parents.

    Raises:
        KeyError: a parent is not among `completions`.
    """
    wanted = 4 * completion.shared_prefix_tokens
    pieces = [completion.context]
    at = completion
    # Walk up: each ancestor gives only its own tokens below what its child shares with it.
    while wanted:
        if at.parent_id is None:
            raise KeyError(f"{at.request_id} shares {wanted // 4} tokens with no parent")
        parent = completions[at.parent_id]
        own = parent.context + parent.output
        start = 4 * parent.shared_prefix_tokens
        if wanted > start:
            pieces.append(own[: wanted - start])
            wanted = start
        at = parent
    return b"".join(reversed(pieces))


def versions(completion: FinishedCompletion) -> tuple[int, ...]:
    """The weight version that sampled each output token."""
    return tuple(span.version for span in completion.spans for _ in range(span.start, span.end))


def trajectories(messages: Iterable[Message]) -> tuple[Trajectory, ...]:
    """Episodes of these completions and imports, by episode id; turns in order of admission.

    Rewards come from grades and scored groups among the messages.
    """
    messages = list(messages)
    rewards = GroupRewards(messages)
    imported = {
        message.record.episode_id: message.record
        for message in messages
        if isinstance(message.record, FinishedEpisode) and message.record.source == "import"
    }
    by_episode: dict[str, list[FinishedCompletion]] = {each: [] for each in imported}
    for completion in chosen(messages).values():
        by_episode.setdefault(completion.episode_id, []).append(completion)
    return tuple(
        Trajectory(
            episode_id=episode_id,
            turns=tuple(
                _turn(each, reward=rewards.turn(each.request_id))
                for each in sorted(found, key=lambda c: c.turn.sequence)
            ),
            reward=rewards.episode(episode_id),
            messages=imported_messages(imported[episode_id]) if episode_id in imported else (),
        )
        for episode_id, found in sorted(by_episode.items())
    )


def imported_messages(episode: FinishedEpisode) -> tuple[ImportedMessage, ...]:
    """The messages of an imported conversation, as its task has them.

    A message that is not only text is shown as JSON. A task without messages, which a client other
    than `forgemq import` may send, is shown whole.
    """
    try:
        messages = msgspec.json.decode(episode.task, type=_Messages).messages
    except msgspec.DecodeError:
        return (ImportedMessage(role="task", text=episode.task.decode(errors="replace")),)
    return tuple(
        ImportedMessage(role=str(message.get("role", "")), text=_message_text(message))
        for message in messages
    )


class _Messages(Struct, frozen=True):
    messages: list[dict[str, object]]


def _message_text(message: Mapping[str, object]) -> str:
    content = message.get("content")
    if isinstance(content, str) and message.keys() <= {"role", "content"}:
        return content
    rest = {name: value for name, value in message.items() if name != "role"}
    return msgspec.json.encode(rest).decode()


def _turn(completion: FinishedCompletion, *, reward: TurnReward) -> TrajectoryTurn:
    return TrajectoryTurn(
        completion_id=completion.request_id,
        episode_id=completion.episode_id,
        sequence=completion.turn.sequence,
        parent_id=completion.parent_id,
        shared_prefix_tokens=completion.shared_prefix_tokens,
        context=tuple(unpack_ids(completion.context)),
        output=tuple(unpack_ids(completion.output)),
        logprobs=tuple(unpack_floats(completion.logprobs)),
        versions=versions(completion),
        temperature=completion.temperature,
        support=completion.support,
        finish_reason=completion.finish_reason,
        queued_s=completion.queued_s,
        engine_s=completion.engine_s,
        cached_tokens=completion.cached_tokens,
        messages=completion.turn.messages.decode(errors="replace"),
        reward=reward,
    )
