"""The turns of a group: tokens, log-probabilities, weight versions and what they earned."""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from forgemq_contracts.accounting import end_of, is_candidate
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.context_cuts import ContextCut, CutForm
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.fields import ForkReason
from forgemq_contracts.messages import Message
from forgemq_run_view.rewards import EpisodeReward, GroupRewards, TurnReward

TOKEN_BYTES = 4


class CutView(Struct, frozen=True, kw_only=True):
    """One context function that was applied before a turn."""

    function: str
    form: CutForm
    after_id: str | None
    is_written: bool
    parameters: str
    tokens_before: Annotated[
        int | None, Meta(description="Of the context that was cut, its newest answer included.")
    ]


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
    fork_reason: ForkReason | None = None
    cuts: tuple[CutView, ...] = ()
    seen: Annotated[
        tuple[int, ...],
        Meta(
            description="The whole context, if it was cut before this turn and the log still has "
            "all that it goes on from; else empty."
        ),
    ] = ()


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
    completions = chosen(messages)
    for completion in completions.values():
        by_episode.setdefault(completion.episode_id, []).append(completion)
    return tuple(
        Trajectory(
            episode_id=episode_id,
            turns=tuple(
                _turn(each, completions, reward=rewards.turn(each.request_id))
                for each in sorted(found, key=lambda c: c.turn.sequence)
            ),
            reward=rewards.episode(episode_id),
            # The turns of an import that trains say what its messages say.
            messages=imported_messages(imported[episode_id])
            if episode_id in imported and not found
            else (),
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


def _turn(
    completion: FinishedCompletion,
    completions: Mapping[str, FinishedCompletion],
    *,
    reward: TurnReward,
) -> TrajectoryTurn:
    turn = completion.turn
    is_cut = bool(turn.cuts) or turn.fork_reason == "compaction"
    return TrajectoryTurn(
        completion_id=completion.request_id,
        episode_id=completion.episode_id,
        sequence=turn.sequence,
        parent_id=completion.parent_id,
        shared_prefix_tokens=completion.shared_prefix_tokens,
        context=tuple(unpack_ids(completion.context)),
        output=tuple(unpack_ids(completion.output)),
        logprobs=tuple(unpack_floats(completion.logprobs)),
        versions=versions(completion),
        temperature=completion.temperature,
        support=completion.support,
        finish_reason=end_of(completion),
        queued_s=completion.queued_s,
        engine_s=completion.engine_s,
        cached_tokens=completion.cached_tokens,
        messages=turn.messages.decode(errors="replace"),
        reward=reward,
        fork_reason=turn.fork_reason,
        cuts=tuple(_cut(each, completions) for each in turn.cuts),
        seen=_whole_context(completion, completions) if is_cut else (),
    )


def _whole_context(
    completion: FinishedCompletion, completions: Mapping[str, FinishedCompletion]
) -> tuple[int, ...]:
    """All tokens of the context; () if a completion that it goes on from is trimmed."""
    try:
        return tuple(unpack_ids(context_bytes(completion, completions)))
    except KeyError:
        return ()


def _cut(cut: ContextCut, completions: Mapping[str, FinishedCompletion]) -> CutView:
    before = completions.get(cut.after_id or "")
    return CutView(
        function=cut.function,
        form=cut.form,
        after_id=cut.after_id,
        is_written=cut.is_written,
        parameters=msgspec.json.encode(cut.parameters).decode(),
        tokens_before=None if before is None else _tokens(before),
    )


def _tokens(completion: FinishedCompletion) -> int:
    """Context and output of a completion."""
    own = len(completion.context) + len(completion.output)
    return completion.shared_prefix_tokens + own // TOKEN_BYTES
