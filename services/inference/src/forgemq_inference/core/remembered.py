"""The tokens of completions that this lane finished, so that a request may name its parent."""

from collections import OrderedDict

from forgemq_inference.core.context import TokenContext


class RememberedCompletions:
    """Context and output of finished completions; the least recently used are evicted first.

    Holds at most `bytes_max`; a single larger entry is not held. The first entry of an id stays: of
    two attempts on one lane the first one written is the completion.

    Example: with `bytes_max` 12, remembering a and b of 9 bytes each leaves b only.
    """

    def __init__(self, *, bytes_max: int) -> None:
        """Begin empty."""
        self._bytes_max = bytes_max
        self._held: OrderedDict[str, TokenContext] = OrderedDict()
        self.size_bytes = 0

    def remember(self, completion_id: str, context: TokenContext) -> None:
        """Hold a completion that requests may continue; evict others if the limit is exceeded."""
        if completion_id in self._held or context.size_bytes > self._bytes_max:
            return
        self._held[completion_id] = context
        self.size_bytes += context.size_bytes
        while self.size_bytes > self._bytes_max:
            _, evicted = self._held.popitem(last=False)
            self.size_bytes -= evicted.size_bytes

    def prefix(self, completion_id: str, *, tokens_count: int) -> TokenContext | None:
        """First tokens of a completion; None if it is not held or has fewer."""
        held = self._held.get(completion_id)
        if held is None or held.tokens_count < tokens_count:
            return None
        self._held.move_to_end(completion_id)
        return held.first(tokens_count)
