"""The tokens of a finished completion: its own bytes, and those it shares with its ancestors."""

from typing import TypeAlias

from forgemq_gateway.core.known_completion import TOKEN_BYTES, KnownCompletion

_FIRST_BLOCK_BYTES = 1024

LaneEpoch: TypeAlias = tuple[int, int]
"""A lane, under one epoch: another epoch has nothing of what the lane had."""


def tokens_of(completion: KnownCompletion, *, count: int | None = None, skip: int = 0) -> bytes:
    """Tokens [skip, count) of a completion's context and output.

    Args:
        completion: The last one of the chain that holds them.
        count: End, exclusive; None for all.
        skip: Leading tokens to leave out; ancestors that hold only those are not visited.
    """
    limit = completion.total_tokens if count is None else count
    parts: list[bytes] = []
    node: KnownCompletion | None = completion
    while node is not None and limit > skip:
        first = max(node.shared_tokens, skip)
        if limit > first:
            start = (first - node.shared_tokens) * TOKEN_BYTES
            end = (limit - node.shared_tokens) * TOKEN_BYTES
            # Not of their sum: it would copy the whole prompt for the last tokens of it.
            parts.append(
                node.output[max(0, start - len(node.context)) : max(0, end - len(node.context))]
            )
            parts.append(node.context[start:end])
            limit = first
        limit = min(limit, node.shared_tokens)
        node = node.parent
    return b"".join(reversed(parts))


def common_tokens(left: bytes, right: bytes) -> int:
    """Number of leading tokens that both have; its time grows with them, and with nothing else."""
    size = min(len(left), len(right)) // TOKEN_BYTES * TOKEN_BYTES
    start, block = 0, _FIRST_BLOCK_BYTES
    while start < size:
        end = min(size, start + block)
        if left[start:end] != right[start:end]:
            return _common_between(left, right, start // TOKEN_BYTES, end // TOKEN_BYTES)
        start, block = end, 2 * block
    return size // TOKEN_BYTES


def _common_between(left: bytes, right: bytes, low: int, high: int) -> int:
    """As `common_tokens`, if `low` tokens are alike and `high` are not."""
    while high - low > 1:
        middle = (low + high) // 2
        start, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if left[start:end] == right[start:end]:
            low = middle
        else:
            high = middle
    return low
