"""One finished completion of an episode, as the gateway keeps it."""

from msgspec import Struct

from forgemq_contracts.completions import FinishedCompletion, TopTokens, TurnPart
from forgemq_contracts.lanes import WeightsId
from forgemq_gateway.core.replies import Reply
from forgemq_gateway.core.requests import KeyedMessages

TOKEN_BYTES = 4
"""Of a token id, an int32."""

NO_OFFSET = -1
"""Below every offset: no completion was known."""


class KnownCompletion(Struct, kw_only=True, eq=False):
    """One finished completion; tokens as int32 bytes.

    Attributes:
        context: Context tokens after the `shared_tokens` in common with the parent's tokens.
        context_tokens: Length of the whole context.
        path: Digest of the message path that ends with this reply.
        weights: Those that it began under; None if nothing was sampled.
        stop_string: The client's stop string that ended it; "" if none did.
        taken_ms: When its lane read the request; `finished_ms` is by the same clock.
        messages: What its request added to the path, in chat form, if a later one may refer to it.
        exchange: The same and the reply, as they were read when a later one did.
        echoed: Whether a later request of the client extends it.
        after_offset: Offset of the newest completion that the gateway had when this was requested.
    """

    request_id: str
    offset: int
    sequence: int
    parent: "KnownCompletion | None"
    shared_tokens: int
    context: bytes
    output: bytes
    context_tokens: int
    path: bytes
    reply: Reply
    tools_digest: str
    lane: int
    epoch: int
    weights: WeightsId | None = None
    sampled_end: str
    stop_string: str = ""
    engine_s: float
    alone_s: float | None = None
    cached_tokens: int
    taken_ms: int
    finished_ms: int
    temperature: float
    messages: bytes = b""
    exchange: KeyedMessages | None = None
    logprobs: bytes = b""
    top_tokens: TopTokens | None = None
    is_fork: bool = False
    echoed: bool = False
    after_offset: int = NO_OFFSET
    children: "list[KnownCompletion]" = []

    @property
    def output_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.output) // TOKEN_BYTES

    @property
    def total_tokens(self) -> int:
        """Number of context and output tokens."""
        return self.context_tokens + len(self.output) // TOKEN_BYTES


def began_under(record: FinishedCompletion) -> WeightsId | None:
    """The weights that sampled the first token; None if none was sampled."""
    return (record.spans[0].lineage, record.spans[0].version) if record.spans else None


def known_before(part: TurnPart, *, parent: KnownCompletion | None) -> int:
    """Offset of the newest completion that the request can have waited for, or NO_OFFSET.

    It follows from the parent alone if the record does not say it.
    """
    if part.after_offset is not None:
        return part.after_offset
    return NO_OFFSET if parent is None else parent.offset
