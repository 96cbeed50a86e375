"""What the agent of an episode sent and what the policy saw, request by request, from the log."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.context_cuts import ContextCut
from forgemq_contracts.turn_reading import parses_tools
from forgemq_run_view.trajectory import context_bytes

ChatMessage: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]
ReadReply: TypeAlias = Callable[
    [FinishedCompletion, Sequence[int], Sequence[Tool]], Mapping[str, Any]
]
"""The message that a completion was to its agent, given its context and the tools it might call."""

_LIST = msgspec.json.Decoder(list[dict[str, Any]])


class SentRequest(Struct, frozen=True, kw_only=True):
    """One request of an agent, whole.

    Attributes:
        messages: In OpenAI's chat form. A reply that the agent echoed is as it was sampled; what
            the agent changed in it that means the same, as blanks in arguments, is not here.
        tools: As the agent sent them.
        context: Token ids that the policy saw.
        cuts: What the agent says that it did to its context before.
    """

    completion_id: str
    episode_id: str
    sequence: int
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]
    context: tuple[int, ...]
    output: tuple[int, ...]
    cuts: tuple[ContextCut, ...]


def sent_requests(
    completions: Mapping[str, FinishedCompletion], *, read_reply: ReadReply
) -> tuple[SentRequest, ...]:
    """Every request of these completions, by episode and order of admission.

    A prompt of `/v1/completions` has tokens and no messages.

    Args:
        completions: By id, each with its parents.
        read_reply: Reads sampled tokens as the gateway did.

    Raises:
        KeyError: a parent is not among them.
    """
    found: dict[str, SentRequest] = {}
    for completion in sorted(completions.values(), key=lambda each: each.turn.sequence):
        _add(completion, completions, found, read_reply)
    return tuple(sorted(found.values(), key=lambda each: (each.episode_id, each.sequence)))


def _add(
    completion: FinishedCompletion,
    completions: Mapping[str, FinishedCompletion],
    found: dict[str, SentRequest],
    read_reply: ReadReply,
) -> None:
    """Add a request; those that it goes on from are there, since they were admitted before it."""
    turn = completion.turn
    own = _LIST.decode(turn.messages)
    before: tuple[ChatMessage, ...] = ()
    parent = found[completion.parent_id] if completion.parent_id else None
    if parent is not None and not turn.is_fork:
        answered = completions[parent.completion_id]
        before = (*parent.messages, _reply(answered, parent, read_reply))
    found[completion.request_id] = SentRequest(
        completion_id=completion.request_id,
        episode_id=completion.episode_id,
        sequence=turn.sequence,
        messages=(*before, *own),
        tools=_tools(completion, parent),
        context=tuple(unpack_ids(context_bytes(completion, completions))),
        output=tuple(unpack_ids(completion.output)),
        cuts=turn.cuts,
    )


def _tools(completion: FinishedCompletion, parent: SentRequest | None) -> tuple[Tool, ...]:
    """The tools of a request; its record leaves out those that its parent has too."""
    if not completion.turn.tools_digest:
        return ()
    if completion.turn.tools or parent is None:
        return tuple(_LIST.decode(completion.turn.tools or b"[]"))
    return parent.tools


def _reply(
    completion: FinishedCompletion, request: SentRequest, read_reply: ReadReply
) -> ChatMessage:
    tools = request.tools if parses_tools(completion.turn) else ()
    return dict(read_reply(completion, request.context, tools))
