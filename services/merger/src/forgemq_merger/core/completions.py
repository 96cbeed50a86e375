"""The completions of an open group, as deltas in log order."""

from collections.abc import Sequence

from msgspec import Struct

from forgemq_contracts.accounting import is_candidate
from forgemq_contracts.completions import FinishedCompletion, Support, WeightSpan

INT32_BYTES = 4  # of one token id on the wire


class KeptCompletion(Struct, frozen=True, kw_only=True):
    """What a tree needs of one completion."""

    completion_id: str
    offset: int
    parent_id: str | None
    shared_prefix_tokens: int
    context: bytes
    output: bytes
    logprobs: bytes
    temperature: float
    support: Support
    spans: tuple[WeightSpan, ...]
    routes: bytes = b""

    @property
    def output_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.output) // INT32_BYTES

    @property
    def route_bytes(self) -> int:
        """Bytes of one token's expert routes; 0 if none were recorded."""
        return len(self.routes) // self.output_tokens if self.routes else 0

    @property
    def has_entries(self) -> bool:
        """Whether its tokens train: sampled from the whole distribution (G4), and at least one."""
        return self.support == "full" and self.output_tokens > 0


class GroupCompletions:
    """Completions of one group until it is merged; of each request id only the one that counts.

    Records come in offset order, so the first candidate of a request id has the lowest offset:
    the rule of `forgemq_contracts.accounting`.
    """

    def __init__(self, completions: Sequence[KeptCompletion] = ()) -> None:
        self._by_id = {completion.completion_id: completion for completion in completions}

    def add(self, record: FinishedCompletion, *, offset: int) -> None:
        """Keep the record if it is the completion of its request id."""
        if not is_candidate(record) or record.request_id in self._by_id:
            return
        self._by_id[record.request_id] = KeptCompletion(
            completion_id=record.request_id,
            offset=offset,
            parent_id=record.parent_id if record.shared_prefix_tokens else None,
            shared_prefix_tokens=record.shared_prefix_tokens,
            context=record.context,
            output=record.output,
            logprobs=record.logprobs,
            temperature=record.temperature,
            support=record.support,
            spans=record.spans,
            routes=record.routes,
        )

    def in_log_order(self) -> tuple[KeptCompletion, ...]:
        """Lowest offset first: parents come before their children."""
        return tuple(self._by_id.values())
