"""One group as its records describe it, and how lists and the window show it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forgemq_contracts.fields import Source
from forgemq_contracts.groups import AdmittedGroup, EpisodeScore, RequestedGroup
from forgemq_run_view.state import GroupRow, Position, WindowPosition


@dataclass(slots=True)
class GroupEntry:
    """One group as its records describe it, in whatever order they came."""

    group_id: str
    domain: str = ""
    purpose: str = ""
    source: Source = "agent"
    group_size: int = 0
    queue_index: int | None = None
    version: int = 0
    round_name: str = ""
    is_greedy: bool = False
    is_requested: bool = False
    is_waiting: bool = False
    is_admitted: bool = False
    is_scored: bool = False
    is_ready: bool = False
    scheduled_step: int | None = None
    is_trained: bool = False
    reason: str = ""
    scored: tuple[EpisodeScore, ...] | None = None
    success: float | None = None
    finished: set[int] = field(default_factory=set)
    completion_offsets: list[tuple[int, int]] = field(default_factory=list)
    shown_offsets: list[tuple[str, int, int]] = field(default_factory=list)
    completions: int = 0
    truncated: int = 0
    version_min: int | None = None
    version_max: int | None = None
    is_passed_over: bool = False

    def describe(self, record: RequestedGroup | AdmittedGroup) -> None:
        """Take in what its request says, and its admission again."""
        self.domain, self.purpose, self.source = record.domain, record.purpose, record.source
        self.group_size, self.round_name = record.group_size, record.round_name

    @property
    def is_in_round(self) -> bool:
        """Whether it measures the policy in an evaluation round, as far as it is admitted."""
        return self.is_admitted and self.purpose == "eval" and not self.is_untrained

    @property
    def is_untrained(self) -> bool:
        """Whether it is an import or live traffic, which are in rows of their own.

        So is an import that trains: what it earned says nothing of the policy.
        """
        return self.source != "agent"

    def is_complete(self) -> bool:
        """Whether every record that changes a total was seen."""
        is_counted = self.is_requested and self.is_admitted and self.is_scored
        if self.is_in_round and self.version_min is None:
            return False  # Its evaluation round still lacks the versions that sampled it.
        return bool(self.reason) and is_counted and len(self.finished) >= self.group_size

    def position(self) -> Position:
        """How far the group has come."""
        if self.reason and self.reason != "trained":
            return "retired"
        if self.is_trained or self.reason == "trained":
            return "trained"
        if self.scheduled_step is not None:
            return "scheduled"
        if self.is_ready:
            return "ready"
        if self.is_scored:
            return "complete"
        if self.is_admitted:
            return "playing"
        return "waiting" if self.is_requested else "unknown"


def window_positions(
    entries: Sequence[GroupEntry], *, head: int | None, window: int
) -> tuple[WindowPosition, ...]:
    """Entries of one queue by queue index, and which of them are in the window at `head`."""
    counted = 0
    positions = []
    for entry in entries:
        if entry.queue_index is None:
            continue
        is_retired = entry.position() == "retired"
        is_in_window = head is not None and entry.queue_index >= head and counted < window
        # A group that retired untrained does not count as one of the W positions.
        counted += is_in_window and not is_retired
        positions.append(
            WindowPosition(
                queue_index=entry.queue_index,
                group_id=entry.group_id,
                position=entry.position(),
                is_in_window=is_in_window and not is_retired,
                episodes_finished=len(entry.finished),
                group_size=entry.group_size,
                reason=entry.reason,
            )
        )
    return tuple(positions)


def row(entry: GroupEntry) -> GroupRow:
    """The group as a list shows it."""
    return GroupRow(
        group_id=entry.group_id,
        domain=entry.domain,
        purpose=entry.purpose,
        source=entry.source,
        queue_index=entry.queue_index,
        position=entry.position(),
        reason=entry.reason,
        step=entry.scheduled_step,
        group_size=entry.group_size,
        completions=max(len(entry.completion_offsets), entry.completions),
        truncated=entry.truncated,
        success=entry.success,
    )
