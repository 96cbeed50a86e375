"""Limits on the tree of messages of one episode: how long a path may be, and how many there are."""

from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import Limit, RefusedError
from forgemq_gateway.core.plans import Prepared
from forgemq_gateway.core.requests import Request


def check_path_length(request: Request, *, messages_max: int) -> None:
    """Return if the path of a request's messages is short enough.

    Raises:
        RefusedError: 400: it has more messages.
    """
    count = len(request.messages)
    if count > messages_max:
        raise _beyond(
            f"a path of messages may have at most {messages_max} messages and results "
            f"(FORGEMQ_GATEWAY_PATH_MESSAGES_MAX), got {count}",
            limit="path_messages",
        )


def check_path_count(prepared: Prepared, *, episode: HeldEpisode, paths_max: int) -> None:
    """Return if a turn goes on with a path of its episode, or may begin another one.

    Paths are what no turn goes on with yet: all turns, without those that another one extends.

    Args:
        prepared: Of a turn that no lane has yet.
        episode: Its other turns count if they are answered or prepared.
        paths_max: Most paths that the episode may have.

    Raises:
        RefusedError: 400: it begins another path, and there are as many as there may be.
    """
    answered = episode.history.completions
    open_turns = [
        turn.prepared
        for turn in episode.turns.values()
        if turn.prepared is not None and turn.request_id not in answered
    ]
    continued = {_extended(turn) for turn in open_turns} - episode.continued - {""}
    extended = _extended(prepared)
    begins = extended in ("", *continued) or extended in episode.continued
    paths = len(answered) + len(open_turns) - len(episode.continued) - len(continued)
    if begins and paths >= paths_max:
        why = prepared.part.fork_reason or "the reply before it is continued already"
        raise _beyond(
            f"an episode may have at most {paths_max} paths of messages "
            f"(FORGEMQ_GATEWAY_EPISODE_PATHS_MAX), and this request begins another one: {why}",
            limit="episode_paths",
        )


def _extended(prepared: Prepared) -> str:
    """The completion that a turn goes on from; "" if it begins a path."""
    parent = prepared.parent
    return "" if parent is None or prepared.part.is_fork else parent.request_id


def _beyond(message: str, *, limit: Limit) -> RefusedError:
    return RefusedError(
        message, status=400, kind="invalid_request_error", param="messages", limit=limit
    )
