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
    teacher_logprobs: bytes = b""

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

    Attributes:
        is_named: A snapshot names its records, and a restore recalls them. False for a group whose
            completions came in a snapshot of logic version 1.
    """

    def __init__(
        self, completions: Sequence[KeptCompletion] = (), *, offsets: Sequence[int] = ()
    ) -> None:
        self._by_id = {completion.completion_id: completion for completion in completions}
        self._offsets = list(offsets)
        self.is_named = not completions

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the records that hold its completions, ascending."""
        return tuple(self._offsets)

    def add(self, record: FinishedCompletion, *, offset: int) -> None:
        """Keep the record if it is the completion of its request id."""
        if is_candidate(record) and record.request_id not in self._by_id:
            self._offsets.append(offset)
            self.recall(record, offset=offset)

    def recall(self, record: FinishedCompletion, *, offset: int) -> None:
        """Take back a record at one of the offsets."""
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
            teacher_logprobs=record.teacher_logprobs,
        )

    def in_log_order(self) -> tuple[KeptCompletion, ...]:
        """Lowest offset first: parents come before their children."""
        return tuple(self._by_id.values())
