"""When a run is given up because none of its groups comes to anything."""

from collections.abc import Sequence

from forgemq_contracts.groups import MergedGroup, RetiredGroup
from forgemq_contracts.run import Queue

DETAIL_CHARACTERS_MAX = 400
SLOTS_FAILED_MAX = 3
"""Times all slots of a queue: what goes wrong for a moment costs the groups that are in generation
then, one time the slots."""

# Retirements that say nothing about whether episodes can be played and graded.
_NEUTRAL = frozenset({"evaluated", "cancelled", "stale"})


class FailingGroups:
    """Counts, for each domain, the training groups that failed or expired in a row.

    Example, a limit of 3: failed, failed, zero_variance, failed, expired, cancelled: two in a row.
    The next one that fails is the third: the run is given up.

    A group that can train counts when it is merged: it retires with all the others of its step,
    while those that fail retire at once. Topics may be read in any order: rows are in log time.

    Args:
        queues: Of the run.
        groups_max: The limit; 0 for three times the slots of each queue.
        since_ms: Start of the run's process; what an earlier one saw does not count.
    """

    def __init__(self, queues: Sequence[Queue], *, groups_max: int, since_ms: int) -> None:
        self._limits = {q.domain: groups_max or SLOTS_FAILED_MAX * q.slots for q in queues}
        self._in_a_row = dict.fromkeys(self._limits, 0)
        self._newest: dict[str, RetiredGroup] = {}
        self._counts_from_ms = dict.fromkeys(self._limits, since_ms)

    def count_retired(self, group: RetiredGroup, *, at_ms: int) -> None:
        """A group is over."""
        if group.domain not in self._limits or group.reason in _NEUTRAL or group.purpose == "eval":
            return
        if group.reason not in ("failed", "expired"):
            self._begin_anew(group.domain, at_ms=at_ms)
        elif at_ms >= self._counts_from_ms[group.domain]:
            self._in_a_row[group.domain] += 1
            self._newest[group.domain] = group

    def count_merged(self, group: MergedGroup, *, at_ms: int) -> None:
        """A group was played and graded; where it can train, failures before it are no row."""
        if group.domain in self._limits and not group.not_trainable:
            self._begin_anew(group.domain, at_ms=at_ms)

    def _begin_anew(self, domain: str, *, at_ms: int) -> None:
        if at_ms >= self._counts_from_ms[domain]:
            self._counts_from_ms[domain] = at_ms
            self._in_a_row[domain] = 0

    def verdict(self) -> str:
        """Why the run is given up, in one line; "" while it is not."""
        for domain, count in self._in_a_row.items():
            if count >= self._limits[domain]:
                newest = self._newest[domain]
                detail = " ".join(newest.detail.split())[:DETAIL_CHARACTERS_MAX]
                return (
                    f"{count} groups of {domain} failed in a row, the limit is "
                    f"{self._limits[domain]} (FORGEMQ_LAUNCHER_GROUPS_FAILED_MAX); the newest, "
                    f"{newest.group_id}, {newest.reason}: {detail}"
                )
        return ""
