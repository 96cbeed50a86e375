"""How many tokens a pass of the engine over drafted ones gives, under its newest weights."""

from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.speculation import verified_tokens
from forgemq_inference.core.weights import BASE, Weights


class AcceptanceMeter:
    """The mean over completions that the newest weights sampled whole; each version begins at 0.

    Example: under 1.4 two completions of 13 and 7 tokens took 4 and 5 passes: (12 + 6) / 9 = 2.
    """

    def __init__(self) -> None:
        """Begin without a completion."""
        self._weights: Weights = BASE
        self._tokens = 0
        self._verifications = 0

    def observe(self, record: FinishedCompletion) -> float | None:
        """Count a completion; the mean so far, None if it says nothing about the newest weights."""
        if not record.verifications or len(record.spans) != 1:
            return None
        weights = Weights(record.spans[0].lineage, record.spans[0].version)
        if weights < self._weights:
            return None
        if weights > self._weights:
            self._weights, self._tokens, self._verifications = weights, 0, 0
        self._tokens += verified_tokens(record)
        self._verifications += record.verifications
        return self._tokens / self._verifications
