"""What a request means in its episode, before any token is made."""

from msgspec import Struct

from forgemq_contracts.completions import Constraint, TurnPart
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.fields import ForkReason
from forgemq_gateway.core.digests import EMPTY_PATH
from forgemq_gateway.core.forks import branch_reason, fork_reason, prompt_fork_reason
from forgemq_gateway.core.history import History, Match
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.prompt_paths import prompt_key
from forgemq_gateway.core.requests import Request


class Plan(Struct, frozen=True, kw_only=True):
    """A request beside the completion it extends.

    Attributes:
        keys: Match key of each message.
        match: The longest known path it starts with; None if it is rendered from its start.
        fork_reason: Why it begins another path; None if it is the next turn of one, or the first of
            its episode.
        behind: Of a text prompt with a match: what follows the context of that completion.
    """

    request: Request
    keys: tuple[str, ...]
    match: Match | None
    fork_reason: ForkReason | None = None
    behind: str = ""


class Prepared(Struct, frozen=True, kw_only=True):
    """A request as tokens, ready for a lane.

    Attributes:
        parent: The completion whose tokens it starts with, if any.
        shared_tokens: Leading tokens in common with the parent's context and output.
        context: Tokens after those.
        given: Tokens of a reply that is read and not sampled; b"" if it is sampled.
    """

    parent: KnownCompletion | None
    shared_tokens: int
    context: bytes
    context_tokens: int
    sampling: Sampling
    constraint: Constraint | None = None
    top_tokens: int = 0
    is_live: bool = False
    given: bytes = b""
    part: TurnPart


def plan(request: Request, *, history: History) -> Plan:
    """Find the completion that this request extends."""
    if request.prompts:
        return _prompt_plan(request, history=history)
    keys = history.keys(request.digests)
    match = history.match(keys, request.echo)
    if match is not None and not _keeps_tools(match.completion, request):
        return Plan(request=request, keys=keys, match=None, fork_reason="other_tools")
    if match is not None:
        reason = branch_reason(history, keys, request.messages, match=match)
    else:
        digest = request.tools_digest
        reason = fork_reason(history, keys, request.messages, tools_digest=digest)
    if reason is not None and request.cuts:
        reason = "compaction"  # The agent says so; the messages may look like anything.
    return Plan(request=request, keys=keys, match=match, fork_reason=reason)


def _prompt_plan(request: Request, *, history: History) -> Plan:
    """As `plan`, for a prompt without a template."""
    (prompt,) = request.prompts
    key = prompt_key(prompt)
    continued = history.continued(prompt)
    if continued is not None:
        match = Match(completion=continued.completion, consumed=0, path=EMPTY_PATH)
        return Plan(request=request, keys=(key,), match=match, behind=continued.behind)
    reason = prompt_fork_reason(history, prompt, key=key)
    return Plan(request=request, keys=(key,), match=None, fork_reason=reason)


def _keeps_tools(completion: KnownCompletion, request: Request) -> bool:
    """Whether the tools in the completion's tokens may stay: the client sent the same or none."""
    return request.tools_digest in ("", completion.tools_digest)
