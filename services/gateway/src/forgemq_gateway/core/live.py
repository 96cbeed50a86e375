"""Live traffic: which key is whose, and which open episode a request goes on with.

Nobody claims an episode here. So a request belongs to the conversation whose reply it repeats, or
to the session that its caller names; any other begins a conversation of its own.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from forgemq_contracts.live_key import LiveKey
from forgemq_gateway.core.choices import choices_of
from forgemq_gateway.core.episodes import Ending, GroupFacts, HeldEpisode
from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.history import History
from forgemq_gateway.core.keys import key_sha256
from forgemq_gateway.core.repetition import repetition
from forgemq_gateway.core.replies import Reply
from forgemq_gateway.core.requests import KeyedMessages, Request

SESSION_HEADER = "x-forgemq-session"
"""All requests with one value are one episode, whatever their messages."""

_SESSION_CHARACTERS_MAX = 200


class LiveCaller(Struct, frozen=True, kw_only=True):
    """Who sends a request with a live key; `session` is "" if the request names none.

    Raises:
        RefusedError: 400, the session has too many characters, or some that do not print.
    """

    policy: LiveKey
    session: str = ""

    def __post_init__(self) -> None:
        if len(self.session) > _SESSION_CHARACTERS_MAX or not self.session.isprintable():
            raise invalid(
                f"{SESSION_HEADER} must have at most {_SESSION_CHARACTERS_MAX} characters that "
                "print",
                param=SESSION_HEADER,
            )

    @property
    def home(self) -> str:
        """An id whose partition has all groups of this caller, so that one gateway has them.

        It follows from key and header alone: no body is read before the gateway is found.
        """
        text = f"{self.policy.name}\0{self.session}".encode()
        return "live-" + hashlib.blake2b(text, digest_size=8).hexdigest()

    def has(self, facts: GroupFacts) -> bool:
        """Whether a group is of this caller's key."""
        is_its = facts.source == "live" and facts.domain == self.policy.domain
        return is_its and facts.task == live_task(self.policy)


class LiveKeys:
    """The keys of live traffic, by their hashes."""

    def __init__(self, policies: Iterable[LiveKey]) -> None:
        self._policies = tuple(policies)

    def policy(self, key: str | None) -> LiveKey | None:
        """What holds for a key; None if it is not live. Every hash is compared, as for admins."""
        if not key or not self._policies:
            return None
        digest = key_sha256(key)
        found = [each for each in self._policies if hmac.compare_digest(each.key_sha256, digest)]
        return found[0] if found else None


def live_task(policy: LiveKey) -> bytes:
    """The task of every group of this key: it marks them as this key's."""
    return msgspec.json.encode({"live": policy.name})


class OpenConversations:
    """What several episodes have said so far; implements `conversation.Conversation`."""

    def __init__(self, episodes: Sequence[HeldEpisode]) -> None:
        self._histories = [episode.history for episode in episodes]

    def reply_to(self, request_id: str) -> Reply | None:
        """The reply to this request; None if none of them has it."""
        replies = (history.reply_to(request_id) for history in self._histories)
        return next((reply for reply in replies if reply is not None), None)

    def messages_until(self, request_id: str) -> KeyedMessages | None:
        """All messages up to the reply to this request, and it; None if none of them has it."""
        found = (history.messages_until(request_id) for history in self._histories)
        return next((messages for messages in found if messages is not None), None)


def continued(
    request: Request, episodes: Sequence[HeldEpisode], *, headers: Mapping[str, str]
) -> HeldEpisode | None:
    """The open episode that a request goes on with; None if it begins a conversation.

    That is the one of the last reply that it names by id, or else the one whose replies it repeats
    furthest. If it repeats no reply, it may be the retry of a first request: its headers say so, or
    no client waits for the same body's answer, which nobody has had. The same body otherwise comes
    from another caller.
    """
    named = _named(request, episodes)
    if named is not None:
        return named
    repeated = repetition(headers, body_digest=request.body_digest)
    choices = choices_of(replace(request, body_digest=repeated.body_digest))

    def fitness(episode: HeldEpisode) -> tuple[int, bool, Beginning, int]:
        known = episode.known([each.body_digest for each in choices], is_retry=repeated.is_retry)
        is_awaited = any(each is not None for each in known)
        is_repeated = is_awaited and (repeated.is_retry or not episode.clients)
        beginning = _beginning(choices[0], episode.history)
        return beginning.repeated, is_repeated, beginning, episode.opened.opened_ms

    found = max(episodes, key=fitness, default=None)
    return None if found is None or not any(fitness(found)[:2]) else found


class Beginning(NamedTuple):
    """What a request has in common with an episode; the more, the better.

    Attributes:
        repeated: Messages, or tokens of a prompt, with which the last reply ends that it repeats.
        has_thought: It sends that reply's reasoning back.
        known: Leading messages that an earlier request had.
        is_next: No other request goes on with that reply. Of conversations that were the same so
            far, each goes on in an episode of its own.
    """

    repeated: int = 0
    has_thought: bool = False
    known: int = 0
    is_next: bool = False


def _named(request: Request, episodes: Sequence[HeldEpisode]) -> HeldEpisode | None:
    """The episode of the last reply that this request names; None if it names none of theirs."""
    names = (message.answered_id for message in reversed(request.messages) if message.answered_id)
    known = (each for name in names for each in episodes if name in each.history.completions)
    return next(known, None)


def _beginning(request: Request, history: History) -> Beginning:
    if request.prompts:
        continued = history.continued(request.prompts[0])
        tokens = 0 if continued is None else continued.completion.total_tokens
        return Beginning(repeated=tokens)
    keys = history.keys(request.digests)
    match = history.match(keys, request.echo)
    if match is None:
        return Beginning()
    thought = request.echo(match.consumed - 1).thought
    return Beginning(
        repeated=match.consumed,
        has_thought=bool(thought) and thought == match.completion.reply.thinking.strip(),
        known=len(history.paths.known(keys)),
        is_next=not history.paths.is_continued(match.path),
    )


def live_ending(episode: HeldEpisode) -> Ending:
    """How an episode of live traffic ends when no request goes on with it."""
    session = episode.opened.session
    result = msgspec.json.encode({"session": session}) if session else b""
    if not episode.history.completions:
        return Ending(status="aborted", result=result, detail="no request was answered")
    cause = episode.truncated_by(UNSET)
    return Ending(status="completed", truncated_by=cause, result=result)
