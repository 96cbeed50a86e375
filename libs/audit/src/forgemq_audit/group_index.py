"""Where one partition of the log holds its groups, and all records of a few groups at a time."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from forgemq_audit.group_records import GroupRecords
from forgemq_bus.kept_records import message_of, read_from
from forgemq_bus.log import Log, Place, Record
from forgemq_contracts.accounting import RetiredIds
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.topics import (
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    MERGED_TREES,
    SCORED_GROUPS,
    Topic,
)
from forgemq_contracts.trees import MergedTree

COMPARED: tuple[Topic, ...] = (FINISHED_COMPLETIONS, FINISHED_EPISODES, SCORED_GROUPS, MERGED_TREES)
"""Topics whose records are compared; partition p of them holds all records of its groups."""

GROUPS_PER_ROUND_MAX = 100
BYTES_PER_ROUND_MAX = 64 * 1024 * 1024


class RoundLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one round of an audit reads at once.

    Attributes:
        groups_max: Groups in one round. With a hundred, the reader and the transaction of a round
            cost little beside its records, and the results fit easily in one transaction.
        bytes_max: Size of their records on the wire, since groups differ by orders of magnitude. A
            larger group is a round alone.
    """

    groups_max: int = GROUPS_PER_ROUND_MAX
    bytes_max: int = BYTES_PER_ROUND_MAX


ROUND_LIMITS = RoundLimits()


@dataclass(slots=True)
class GroupSpan:
    """Where a partition holds a group: its first and its last offset in each topic."""

    offsets: dict[Place, tuple[int, int]] = field(default_factory=dict)
    size_bytes: int = 0

    def add(self, record: Record) -> None:
        """Add a record of the group; records come in offset order."""
        first, _ = self.offsets.get(record.place, (record.offset, 0))
        self.offsets[record.place] = (first, record.offset)
        self.size_bytes += len(record.value)


class GroupIndex:
    """Where one partition holds its groups. It keeps offsets only, so any backlog fits in memory.

    With it a round reads only that part of the partition that its own groups lie in.

    Lifecycle: `read_on` takes in what is new, `records_of` reads some groups in full, `forget`
    drops groups that are over.
    """

    def __init__(self, log: Log, starts: Mapping[Place, int]) -> None:
        self._log = log
        self._next = dict(starts)
        self._spans: dict[str, GroupSpan] = {}

    async def read_on(self, *, over: RetiredIds) -> None:
        """Take in every record up to the present end, except records of groups that are over."""
        ends = await self._log.end_positions(list(self._next))
        async for records in read_from(self._log, self._next, ends=ends):
            for record in records:
                group_id = _group_id(_decoded(record))
                if group_id and group_id not in over and record.offset < ends[record.place]:
                    self._spans.setdefault(group_id, GroupSpan()).add(record)
        self._next = ends

    def merged(self) -> list[str]:
        """Groups that have a tree, oldest group first."""
        return [
            group_id
            for group_id, span in self._spans.items()
            if any(place.topic == MERGED_TREES.name for place in span.offsets)
        ]

    def fitting(self, group_ids: Iterable[str], limits: RoundLimits) -> list[str]:
        """The first of these groups that fit in one round, at least one."""
        taken: list[str] = []
        size_bytes = 0
        for group_id in group_ids:
            size_bytes += self._spans.get(group_id, GroupSpan()).size_bytes
            is_full = len(taken) == limits.groups_max or size_bytes > limits.bytes_max
            if taken and is_full:
                break
            taken.append(group_id)
        return taken

    async def records_of(self, group_ids: Collection[str]) -> dict[str, GroupRecords]:
        """All records of these groups up to where the index has read; trimmed ones are missing."""
        found = {group_id: GroupRecords() for group_id in group_ids}
        starts: dict[Place, int] = {}
        ends: dict[Place, int] = {}
        for group_id in group_ids:
            for place, (first, last) in self._spans.get(group_id, GroupSpan()).offsets.items():
                starts[place] = min(starts.get(place, first), first)
                ends[place] = max(ends.get(place, 0), last + 1)
        if not starts:
            return found
        async for records in read_from(self._log, starts, ends=ends):
            for record in records:
                message = _decoded(record)
                group_id = _group_id(message)
                if message and group_id in found and record.offset < ends[record.place]:
                    found[group_id].add(message, record)
        return found

    def needed(self, *, without: Collection[str]) -> dict[Place, int]:
        """The positions below which no group has records, except these and groups that are over."""
        needed = dict(self._next)
        for group_id, span in self._spans.items():
            if group_id not in without:
                for place, (first, _) in span.offsets.items():
                    needed[place] = min(needed[place], first)
        return needed

    def forget(self, group_ids: Iterable[str]) -> None:
        """Drop groups that are over."""
        for group_id in group_ids:
            self._spans.pop(group_id, None)


def _decoded(record: Record) -> Message | None:
    """None if it does not decode: its readers write a dead letter."""
    try:
        return message_of(record)
    except msgspec.ValidationError:
        return None


def _group_id(message: Message | None) -> str:
    if message is None:
        return ""
    record = message.record
    assert isinstance(record, FinishedCompletion | FinishedEpisode | ScoredGroup | MergedTree)
    return record.group_id
