"""Why a request does not extend the tokens that its episode has recorded.

Decided when the request arrives, from the requests before it and never from their answers: whether
an answer was there in time does not change what is counted. A request that was refused before a
lane had it counts as one that never came.
"""

from collections.abc import Sequence

from forgemq_contracts.fields import ForkReason
from forgemq_gateway.core.history import History, Match
from forgemq_gateway.core.raw_prompts import Prompt
from forgemq_gateway.core.requests import Role


def fork_reason(history: History, keys: Sequence[str], roles: Sequence[Role]) -> ForkReason | None:
    """Why a request without a match forks; None for the first request of an episode.

    Example: after [system, a, reply], the messages [system, a, changed reply, b] are `edited`, and
    [system, summary] are `compaction`; [title system, a] is a `side_request`.

    Args:
        history: What the episode has recorded, with the requests that have no answer yet.
        keys: Match key of each message.
        roles: Role of each message.
    """
    if not history.paths.deepest:
        return None
    known = len(history.paths.known(keys))
    if known == len(keys):
        return "resampled"
    echoes = any(history.is_echo(key) for key in keys[known:])
    if not known and not echoes:
        return "side_request"
    if len(keys) < history.paths.deepest:
        return "compaction"
    return "edited" if echoes or "assistant" in roles[known:] else "side_request"


def branch_reason(
    history: History, keys: Sequence[str], roles: Sequence[Role], *, match: Match
) -> ForkReason | None:
    """Why a request that extends a reply begins another path; None if it is the reply's first.

    Example: after [a, reply, b] and its reply, the messages [a, reply, c] are a
    `side_request`, and [a, reply, b, changed reply, c] are `edited`.

    Args:
        history: As for `fork_reason`.
        keys: Match key of each message.
        roles: Role of each message.
        match: The reply that it extends.
    """
    if not history.paths.is_continued(match.path):
        return None
    if len(history.paths.known(keys)) == len(keys):
        return "resampled"
    return "edited" if "assistant" in roles[match.consumed :] else "side_request"


def prompt_fork_reason(history: History, prompt: Prompt, *, key: str) -> ForkReason | None:
    """As `fork_reason`, for a prompt without a template and its match key."""
    if not history.paths.deepest:
        return None
    if history.paths.known([key]):
        return "resampled"
    return "edited" if history.prompts.begins_with_one(prompt) else "side_request"
