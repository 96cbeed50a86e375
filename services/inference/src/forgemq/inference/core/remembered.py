"""The tokens of completions that this lane finished, so that a request may name its parent."""

from collections import OrderedDict

_TOKEN_BYTES = 4


class RememberedCompletions:
    """Context and output of finished completions as int32 bytes, least recently used out first.

    Holds at most `bytes_max`; an entry that is larger alone is not held. The first entry of an id
    stays: of two attempts on one lane the first written is the completion.

    Example: with `bytes_max` 12, remembering a (8 bytes) and b (8 bytes) leaves b only.
    """

    def __init__(self, *, bytes_max: int) -> None:
        """Nothing remembered yet."""
        self._bytes_max = bytes_max
        self._tokens: OrderedDict[str, bytes] = OrderedDict()
        self.size_bytes = 0

    def remember(self, completion_id: str, tokens: bytes) -> None:
        """Hold the tokens; evict the least recently used ones above the limit."""
        if completion_id in self._tokens or len(tokens) > self._bytes_max:
            return
        self._tokens[completion_id] = tokens
        self.size_bytes += len(tokens)
        while self.size_bytes > self._bytes_max:
            _, evicted = self._tokens.popitem(last=False)
            self.size_bytes -= len(evicted)

    def prefix(self, completion_id: str, *, tokens_count: int) -> bytes | None:
        """First tokens of a completion; None where it is gone or has fewer."""
        tokens = self._tokens.get(completion_id)
        if tokens is None or len(tokens) < tokens_count * _TOKEN_BYTES:
            return None
        self._tokens.move_to_end(completion_id)
        return tokens[: tokens_count * _TOKEN_BYTES]
