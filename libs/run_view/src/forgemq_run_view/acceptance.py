"""How many tokens a pass of the policy over drafted ones gives, by version."""

import itertools

from forgemq_contracts.accounting import is_candidate
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.messages import Message
from forgemq_contracts.speculation import verified_tokens
from forgemq_run_view.state import AcceptancePoint, StepAlarm

ACCEPTANCE_MIN = 1.1
"""At 1 no guess holds: then a head costs time, and most likely was not loaded as it was trained."""
VERIFICATIONS_MIN = 200
"""Passes before a version is compared: their mean then varies by a few hundredths."""
METRIC = "acceptance_length"


class AcceptanceBook:
    """Drafted tokens that held, of completions that one version sampled whole."""

    def __init__(self) -> None:
        self._counted: dict[tuple[int, int], tuple[int, int]] = {}

    def apply(self, message: Message) -> None:
        """Take in one record; records of other kinds are ignored."""
        record = message.record
        if not isinstance(record, FinishedCompletion) or not is_candidate(record):
            return
        if not record.verifications or len(record.spans) != 1:
            return
        weights = (record.spans[0].lineage, record.spans[0].version)
        tokens, verifications = self._counted.get(weights, (0, 0))
        self._counted[weights] = (
            tokens + verified_tokens(record),
            verifications + record.verifications,
        )

    def points(self) -> tuple[AcceptancePoint, ...]:
        """One point for each version that drafted, in order; () without speculation."""
        return tuple(
            AcceptancePoint(
                lineage=lineage,
                version=version,
                length=tokens / verifications,
                verifications=verifications,
            )
            for (lineage, version), (tokens, verifications) in sorted(self._counted.items())
        )

    def alarms(self) -> tuple[StepAlarm, ...]:
        """Versions under which guesses stopped to hold that held under the version before."""
        measured = [each for each in self.points() if each.verifications >= VERIFICATIONS_MIN]
        return tuple(
            StepAlarm(
                step=after.version,
                lineage=after.lineage,
                metric=METRIC,
                value=after.length,
                threshold=ACCEPTANCE_MIN,
                side="below",
            )
            for before, after in itertools.pairwise(measured)
            if after.length < ACCEPTANCE_MIN <= before.length
        )
