"""Where a request's tokens stand in the tree of its episode."""

from msgspec import Struct

from forgemq_contracts.fields import ForkReason
from forgemq_gateway.core.completion_tokens import tokens_of
from forgemq_gateway.core.history import TAIL_TOKENS, History, Match
from forgemq_gateway.core.known_completion import TOKEN_BYTES, KnownCompletion
from forgemq_gateway.core.plans import Plan


class Placed(Struct, frozen=True, kw_only=True):
    """The tokens of a request behind the completion that they share most with.

    Attributes:
        parent: The completion whose tokens it starts with, if any.
        shared_tokens: Leading tokens in common with the parent's context and output.
        context: Tokens after those, as int32 bytes.
        extends: Whether it goes on behind the parent's last token, with the parent's messages.
        fork_reason: None if it is the next turn of a path, or the first of its episode.
        first_message: Index of the first message that the parent's path does not have.
        message_ends: Index in the context after the last token of each further message.
    """

    parent: KnownCompletion | None
    shared_tokens: int
    context: bytes
    fork_reason: ForkReason | None
    extends: bool = False
    first_message: int = 0
    message_ends: tuple[int, ...] = ()

    @property
    def context_tokens(self) -> int:
        """Length of the whole context."""
        return self.shared_tokens + len(self.context) // TOKEN_BYTES

    def tail(self) -> bytes:
        """The last tokens of the context."""
        end = self.context[-TAIL_TOKENS * TOKEN_BYTES :]
        if self.parent is None:
            return end
        missing = TAIL_TOKENS - len(end) // TOKEN_BYTES
        skip = self.shared_tokens - missing
        return tokens_of(self.parent, count=self.shared_tokens, skip=skip) + end


def place_rendered(
    tokens: bytes, message_ends: tuple[int, ...], *, planned: Plan, history: History
) -> Placed:
    """Where a history that was rendered from its start stands.

    It extends the completion that its messages follow if its tokens begin with that completion's,
    context and output. Otherwise it forks, from the completion that it shares most tokens with.
    """
    match = planned.match
    if match is not None and tokens.startswith(tokens_of(match.completion)):
        shared = match.completion.total_tokens
        return Placed(
            parent=match.completion,
            shared_tokens=shared,
            context=tokens[shared * TOKEN_BYTES :],
            fork_reason=planned.fork_reason,
            extends=True,
            first_message=match.consumed,
            message_ends=message_ends[match.consumed :],
        )
    nearest, shared = history.nearest(tokens)
    return Placed(
        parent=nearest,
        shared_tokens=shared,
        context=tokens[shared * TOKEN_BYTES :],
        fork_reason=planned.fork_reason if match is None else _rendered_reason(planned, match),
        message_ends=message_ends,
    )


def _rendered_reason(planned: Plan, match: Match) -> ForkReason:
    """Why the rendering differs from the tokens of the completion that the messages follow."""
    has_same_tools = planned.request.tools_digest == match.completion.tools_digest
    return "rewritten" if has_same_tools else "other_tools"
