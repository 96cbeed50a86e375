"""Evaluation groups: they wait for weights and not for slots, and are in no queue."""

from forgemq_contracts.groups import RequestedGroup
from forgemq_scheduler.core.snapshot import OpenGroup


class Evaluations:
    """Requests that wait, oldest first, and open groups.

    Life of an evaluation group: waiting -> open, as soon as weights serve -> retired when it is
    merged, past its deadline, or one of its records is bad.
    """

    def __init__(self) -> None:
        self.waiting: list[RequestedGroup] = []
        self._open: dict[str, OpenGroup] = {}

    def open(self, request: RequestedGroup, *, queue: int, deadline_ms: int) -> OpenGroup:
        """Let a group begin; its domain's queue lends the number and the deadline, no slot."""
        group = OpenGroup(
            group_id=request.group_id,
            queue=queue,
            queue_index=None,
            deadline_ms=deadline_ms,
            phase="unclaimed",
        )
        self._open[group.group_id] = group
        return group

    def close(self, group_id: str) -> None:
        """Drop a group that retires."""
        del self._open[group_id]

    def keep(self, group: OpenGroup) -> None:
        """Replace an open group by what is known of it since."""
        self._open[group.group_id] = group

    def lapsed(self, *, now_ms: int) -> list[OpenGroup]:
        """Open groups past their deadline, oldest first."""
        return [group for group in self._open.values() if group.deadline_ms <= now_ms]

    def groups(self) -> tuple[OpenGroup, ...]:
        """All open groups, oldest first."""
        return tuple(self._open.values())

    def restore(
        self, *, waiting: tuple[RequestedGroup, ...], groups: tuple[OpenGroup, ...]
    ) -> None:
        """Replace all state with what `waiting` and `groups` were."""
        self.waiting = list(waiting)
        self._open = {group.group_id: group for group in groups}
