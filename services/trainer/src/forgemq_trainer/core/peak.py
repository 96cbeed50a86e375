"""A peak of memory as a function of a block's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes at one moment of a block's forward and backward: a fixed part, and one a token."""

    fixed_bytes: int
    token_bytes: int

    def bytes_of(self, tokens: int) -> int:
        """Bytes of a block of so many tokens."""
        return self.fixed_bytes + tokens * self.token_bytes

    def tokens_in(self, free_bytes: int) -> int:
        """Tokens of the longest block in these bytes; below 0 if the fixed part does not fit."""
        return (free_bytes - self.fixed_bytes) // self.token_bytes


def most_bytes(peaks: Sequence[Peak], tokens: int) -> int:
    """Bytes of the largest peak of a block of so many tokens."""
    return max(peak.bytes_of(tokens) for peak in peaks)
