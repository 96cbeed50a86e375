"""Why a request does not extend the tokens that its episode has recorded.

Decided when the request arrives, from the requests before it and not from their answers: whether
an answer was there in time does not change what is counted. The one exception is an answer that
the request quotes: its client has had it, so it was there. A request that was refused before a lane
had it counts as one that never came.
"""

from collections.abc import Sequence

from forgemq_contracts.fields import ForkReason
from forgemq_gateway.core.history import History, Match
from forgemq_gateway.core.quotes import quote
from forgemq_gateway.core.raw_prompts import Prompt
from forgemq_gateway.core.replies import echo_key
from forgemq_gateway.core.requests import RequestMessage

# An agent goes on from its summary at once, or after a few requests beside it, as for a title.
_ANSWERS_QUOTED = 4


def fork_reason(
    history: History,
    keys: Sequence[str],
    messages: Sequence[RequestMessage],
    *,
    tools_digest: str = "",
) -> ForkReason | None:
    """Why a request without a match forks; None for the first request of an episode.

    Example: after [system, a, reply], the messages [system, a, changed reply, b] are `edited`, and
    [system, summary] are `compaction`; [title system, a] is a `side_request`. A path that is no
    shorter is `compaction` too if its new messages quote one of the newest answers, or if its first
    reply is one that came after others, which it leaves out.

    Args:
        history: What the episode has recorded, with the requests that have no answer yet.
        keys: Match key of each message.
        messages: The messages.
        tools_digest: Of the request.
    """
    if not history.paths.deepest:
        return None
    known = len(history.paths.known(keys))
    if known == len(keys):
        return "resampled"
    if _begins_with_summary(history, keys, messages, known=known):
        return "compaction"
    echoes = any(history.is_echo(key) for key in keys[known:])
    if not known and not echoes:
        return "side_request"
    if len(keys) < history.paths.deepest:
        return "compaction"
    if _leaves_out_turns(history, keys, messages, tools_digest=tools_digest):
        return "compaction"
    return "edited" if echoes or _has_reply(messages[known:]) else "side_request"


def branch_reason(
    history: History, keys: Sequence[str], messages: Sequence[RequestMessage], *, match: Match
) -> ForkReason | None:
    """Why a request that extends a reply begins another path; None if it is the reply's first.

    Example: after [a, reply, b] and its reply, the messages [a, reply, c] are a
    `side_request`, and [a, reply, b, changed reply, c] are `edited`. Later replies without the
    turns between are `compaction`.

    Args:
        history: As for `fork_reason`.
        keys: Match key of each message.
        messages: The messages.
        match: The reply that it extends.
    """
    if not history.paths.is_continued(match.path):
        return None
    known = len(history.paths.known(keys))
    if known == len(keys):
        return "resampled"
    if _begins_with_summary(history, keys, messages, known=known):
        return "compaction"
    if not _has_reply(messages[match.consumed :]):
        return "side_request"
    has_old = any(history.is_echo(key) for key in keys[match.consumed :])
    return "compaction" if has_old and len(keys) < history.paths.deepest else "edited"


def prompt_fork_reason(history: History, prompt: Prompt, *, key: str) -> ForkReason | None:
    """As `fork_reason`, for a prompt without a template and its match key."""
    if not history.paths.deepest:
        return None
    if history.paths.known([key]):
        return "resampled"
    return "edited" if history.prompts.begins_with_one(prompt) else "side_request"


def _has_reply(messages: Sequence[RequestMessage]) -> bool:
    return any(message.role == "assistant" for message in messages)


def _begins_with_summary(
    history: History, keys: Sequence[str], messages: Sequence[RequestMessage], *, known: int
) -> bool:
    """Whether new messages quote one of the newest answers, in place of the turns before it.

    An agent that kept its system prompt, or had none: one with another is another agent, which may
    be asked about an answer.
    """
    if not known and messages[0].role in ("system", "developer"):
        return False
    newest = sorted(history.completions.values(), key=lambda each: each.sequence)
    return any(
        echo_key(each.reply, request_id=each.request_id) not in keys
        and quote(messages[known:], each.reply.text)
        for each in newest[-_ANSWERS_QUOTED:]
    )


def _leaves_out_turns(
    history: History, keys: Sequence[str], messages: Sequence[RequestMessage], *, tools_digest: str
) -> bool:
    """Whether the first reply in the messages came after others of the same agent, not in them.

    Tools tell agents apart: what makes a title has others, or none.
    """
    roles = [message.role for message in messages]
    if not tools_digest or "assistant" not in roles:
        return False
    first = keys[roles.index("assistant")]
    known = [
        (echo_key(each.reply, request_id=each.request_id), each)
        for each in history.completions.values()
    ]
    kept = [each.sequence for key, each in known if key == first]
    return any(
        each.tools_digest == tools_digest and each.sequence < max(kept) and key not in keys
        for key, each in known
        if kept
    )
