"""Which groups lists show: the newest ones, with a share for imports and live traffic."""

from itertools import islice

from msgspec import Struct

from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode
from forgemq_contracts.groups import ScoredGroup

GROUPS_SHOWN_MAX = 4000
"""Groups whose completions can be looked up by offset: more than the page lists."""
UNTRAINED_SHOWN_MAX = 1000
"""Of imports and live traffic, so that many of them hide no group that was played."""
UNTRAINED_SHARE = 4
"""These have at most one row of so many."""


class ShownGroups:
    """Ids of groups, oldest first.

    Lifecycle: `add` each group once, `note_untrained` when a record says that it is one.
    """

    def __init__(self) -> None:
        self._added = 0
        self._played: dict[str, int] = {}  # number in the order of `add`
        self._untrained: dict[str, int] = {}

    def add(self, group_id: str) -> str | None:
        """Add a group; returns the oldest one if it is shown no more."""
        self._added += 1
        self._played[group_id] = self._added
        return _oldest(self._played) if len(self._played) > GROUPS_SHOWN_MAX else None

    def note_untrained(self, group_id: str) -> str | None:
        """Count a group among these; returns the oldest one if it is shown no more."""
        number = self._played.pop(group_id, None)
        if number is None:
            return None
        self._untrained[group_id] = number
        return _oldest(self._untrained) if len(self._untrained) > UNTRAINED_SHOWN_MAX else None

    def newest(self, *, rows_max: int) -> list[str]:
        """Ids of the newest groups, newest first."""
        untrained = list(islice(reversed(self._untrained.items()), rows_max // UNTRAINED_SHARE))
        played = list(islice(reversed(self._played.items()), rows_max - len(untrained)))
        ordered = sorted((*untrained, *played), key=lambda each: each[1], reverse=True)
        return [group_id for group_id, _ in ordered]


def is_shown(record: Struct) -> bool:
    """Whether it is read again, besides completions, if its group is shown."""
    if isinstance(record, FinishedEpisode):
        return record.source == "import"
    return isinstance(record, GradedEpisode | ScoredGroup)


def _oldest(numbers: dict[str, int]) -> str:
    """Remove the group that was put in first, and return it."""
    group_id = next(iter(numbers))
    del numbers[group_id]
    return group_id
