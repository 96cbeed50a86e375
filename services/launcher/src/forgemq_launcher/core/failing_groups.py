"""When a run is given up because its groups fail one after the other."""

from collections.abc import Sequence

from forgemq_contracts.groups import MergedGroup, RetiredGroup
from forgemq_contracts.run import Queue

DETAIL_CHARACTERS_MAX = 400
"""A grader's last line with its exception fits; a whole traceback would hide the group's id."""
SLOTS_FAILED_MAX = 3
"""Times the slots of a queue. A moment of trouble (an engine that restarts) fails at most the
groups in generation, one per slot; three times that is not a moment."""

# These retirements do not tell whether episodes can be played and graded.
_NEUTRAL = frozenset({"evaluated", "cancelled", "stale"})


class FailingGroups:
    """Counts, for each domain, the training groups that failed or expired in a row.

    Example with a limit of 3: failed, failed, zero_variance, failed, expired, cancelled makes two
    in a row. If the next one fails, it is the third, and the run is given up.

    A group that can train counts when it is merged. It retires much later, with all groups of its
    step, while a group that fails retires at once. Topics may be read in any order: what is in a
    row is decided by the records' timestamps.

    Args:
        queues: Of the run.
        groups_max: The limit; 0 for three times the slots of each queue.
        since_ms: Start of this launcher; groups that retired before do not count.
    """

    def __init__(self, queues: Sequence[Queue], *, groups_max: int, since_ms: int) -> None:
        self._limits = {q.domain: groups_max or SLOTS_FAILED_MAX * q.slots for q in queues}
        self._in_a_row = dict.fromkeys(self._limits, 0)
        self._newest: dict[str, RetiredGroup] = {}
        self._counts_from_ms = dict.fromkeys(self._limits, since_ms)

    def count_retired(self, group: RetiredGroup, *, at_ms: int) -> None:
        """Count a group that retired."""
        if group.domain not in self._limits or group.reason in _NEUTRAL or group.purpose == "eval":
            return
        if group.reason not in ("failed", "expired"):
            self._end_row(group.domain, at_ms=at_ms)
        elif at_ms >= self._counts_from_ms[group.domain]:
            self._in_a_row[group.domain] += 1
            self._newest[group.domain] = group

    def count_merged(self, group: MergedGroup, *, at_ms: int) -> None:
        """Count a group that was played and graded; if it can train, it ends the row."""
        if group.domain in self._limits and not group.not_trainable:
            self._end_row(group.domain, at_ms=at_ms)

    def _end_row(self, domain: str, *, at_ms: int) -> None:
        if at_ms >= self._counts_from_ms[domain]:
            self._counts_from_ms[domain] = at_ms
            self._in_a_row[domain] = 0

    def verdict(self) -> str:
        """Why the run must be given up, in one line; "" if it need not be."""
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
