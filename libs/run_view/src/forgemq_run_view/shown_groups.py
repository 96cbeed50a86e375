"""Which groups lists show: the newest ones, with a share for imports and live traffic."""

from bisect import bisect_left, insort
from typing import TypeAlias

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
    """Ids of groups by the time of their first records, however the topics are read.

    Lifecycle: `add` each group once, `note_time` with each of its records, `note_untrained` when a
    record says that it is one.
    """

    def __init__(self) -> None:
        self._played = _Newest(GROUPS_SHOWN_MAX)
        self._untrained = _Newest(UNTRAINED_SHOWN_MAX)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._played or group_id in self._untrained

    def add(self, group_id: str, *, at_ms: int) -> str | None:
        """Add a group; returns the oldest one, maybe this, if it is shown no more."""
        return self._played.put(group_id, at_ms=at_ms)

    def note_time(self, group_id: str, *, at_ms: int) -> None:
        """Take in that the group has a record of this time."""
        self._played.move_back(group_id, at_ms=at_ms)
        self._untrained.move_back(group_id, at_ms=at_ms)

    def note_untrained(self, group_id: str) -> str | None:
        """Count a group among these; returns the oldest one if it is shown no more."""
        at_ms = self._played.remove(group_id)
        return None if at_ms is None else self._untrained.put(group_id, at_ms=at_ms)

    def newest(self, *, rows_max: int) -> list[str]:
        """Ids of the newest groups, newest first."""
        untrained = self._untrained.newest(rows_max // UNTRAINED_SHARE)
        played = self._played.newest(rows_max - len(untrained))
        return [group_id for *_, group_id in sorted((*untrained, *played), reverse=True)]


_Timed: TypeAlias = tuple[int, int, str]
"""Its time, which of the ids of this time it is, and the id."""


class _Newest:
    """The newest ids, at most so many."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._put = 0
        self._by_id: dict[str, _Timed] = {}
        self._ordered: list[_Timed] = []

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._by_id

    def put(self, group_id: str, *, at_ms: int) -> str | None:
        """Put in a new id; returns the oldest if there are too many."""
        self._put += 1
        self._by_id[group_id] = (at_ms, self._put, group_id)
        insort(self._ordered, self._by_id[group_id])
        if len(self._ordered) <= self._kept_max:
            return None
        *_, oldest = self._ordered[0]
        self.remove(oldest)
        return oldest

    def remove(self, group_id: str) -> int | None:
        """Take an id out; returns its time, None if it is not in."""
        timed = self._by_id.pop(group_id, None)
        if timed is None:
            return None
        del self._ordered[bisect_left(self._ordered, timed)]
        return timed[0]

    def move_back(self, group_id: str, *, at_ms: int) -> None:
        """Give an id an earlier time; a later one changes nothing."""
        timed = self._by_id.get(group_id)
        if timed is not None and at_ms < timed[0]:
            self.remove(group_id)
            self.put(group_id, at_ms=at_ms)

    def newest(self, count: int) -> list[_Timed]:
        """The last ones by time."""
        return self._ordered[-count:] if count else []


def is_shown(record: Struct) -> bool:
    """Whether it is read again, besides completions, if its group is shown."""
    if isinstance(record, FinishedEpisode):
        return record.source == "import"
    return isinstance(record, GradedEpisode | ScoredGroup)
