"""Evaluation rounds: what the episodes of each scored, and which weights sampled them."""

from dataclasses import dataclass, field

from forgemq_run_view.group_entry import GroupEntry
from forgemq_run_view.state import EvaluationPoint
from forgemq_run_view.tally import Sums


@dataclass(slots=True)
class _Round:
    sums: Sums = field(default_factory=Sums)
    groups: int = 0
    groups_ended: int = 0
    versions: tuple[int, int] | None = None  # Oldest and newest; None before a completion.


class EvaluationRounds:
    """All rounds of a run, sampled and greedy ones apart.

    A group of a round is started once, at its admission, and ended once; `note_version` may come
    any number of times in between and after.
    """

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, bool], _Round] = {}

    def start(self, entry: GroupEntry) -> None:
        """Count a group that was admitted, with the versions that are known of it."""
        self._round(entry).groups += 1
        for version in (entry.version_min, entry.version_max):
            if version is not None:
                self.note_version(entry, version)

    def note_version(self, entry: GroupEntry, version: int) -> None:
        """These weights sampled a token of the group."""
        each = self._round(entry)
        low, high = each.versions or (version, version)
        each.versions = (min(low, version), max(high, version))

    def end(self, entry: GroupEntry) -> Sums:
        """Count a group that is scored; returns the sums that its episodes belong to."""
        each = self._round(entry)
        each.groups_ended += 1
        return each.sums

    def points(self) -> tuple[EvaluationPoint, ...]:
        """The rounds, oldest weights first; last, those of which nothing is sampled."""
        points = (
            EvaluationPoint(
                round_name=name,
                is_greedy=is_greedy,
                version_min=each.versions[0] if each.versions else None,
                version_max=each.versions[1] if each.versions else None,
                groups=each.groups,
                groups_ended=each.groups_ended,
                tally=each.sums.tally(),
            )
            for (name, is_greedy), each in self._rounds.items()
        )
        return tuple(sorted(points, key=_by_weights))

    def _round(self, entry: GroupEntry) -> _Round:
        return self._rounds.setdefault((entry.round_name, entry.is_greedy), _Round())


def _by_weights(point: EvaluationPoint) -> tuple[bool, int, str, bool]:
    return (point.version_min is None, point.version_min or 0, point.round_name, point.is_greedy)
