"""Where a request's tokens stand in the tree of its episode."""

from msgspec import Struct

from forgemq_contracts.fields import ForkReason
from forgemq_gateway.core.history import TAIL_TOKENS, TOKEN_BYTES, KnownCompletion, tokens_of


class Placed(Struct, frozen=True, kw_only=True):
    """The tokens of a request behind the completion that they share most with.

    Attributes:
        parent: The completion whose tokens it starts with, if any.
        shared_tokens: Leading tokens in common with the parent's context and output.
        context: Tokens after those, as int32 bytes.
        fork_reason: None if it extends the parent, or is the first of its episode.
        first_message: Index of the first message that the parent's path does not have.
        message_ends: Index in the context after the last token of each further message.
    """

    parent: KnownCompletion | None
    shared_tokens: int
    context: bytes
    fork_reason: ForkReason | None
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
