"""How many completions each trained step consumed: those that its groups were scored by."""

from collections import Counter

from forgemq_contracts.groups import RetiredGroup, ScoredGroup
from forgemq_contracts.steps import TrainedStep


class StepSamples:
    """Scored completions by the step that trained their group.

    Topics are read in any order, so the score of a group may come after its step. A group is held
    by its id only until both have come, and what is left of it is a part of its step's sum.
    """

    def __init__(self) -> None:
        self._scored: dict[str, int] = {}  # completions, of groups that no step has trained
        self._awaited: dict[str, int] = {}  # the step, of groups that are trained and not scored
        self._counts: Counter[int] = Counter()

    def score(self, record: ScoredGroup) -> None:
        """Take in a group that may train."""
        step = self._awaited.pop(record.group_id, None)
        if step is None:
            self._scored.setdefault(record.group_id, len(record.completions))
        else:
            self._counts[step] += len(record.completions)

    def train(self, record: TrainedStep) -> None:
        """Take in a step; one that is trained again has the same groups."""
        if record.step in self._counts:
            return
        self._counts[record.step] = 0
        for group_id in record.group_ids:
            count = self._scored.pop(group_id, None)
            if count is None:
                self._awaited[group_id] = record.step
            else:
                self._counts[record.step] += count

    def retire(self, record: RetiredGroup) -> None:
        """Forget a group that no step will train."""
        if record.reason != "trained":
            self._scored.pop(record.group_id, None)

    def of(self, step: int) -> int:
        """Completions of the groups of this step, as far as they are read."""
        return self._counts[step]
