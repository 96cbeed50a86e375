"""Compares every group with its records while they are all there: once it has retired.

What it finds stays on audited-groups for the run's life; the records it was found in may then be
trimmed. One round reads a group partition from where its oldest open group begins, so a round
costs what the open groups hold, and a process that dies in one has done nothing.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from forgemq.bus.log import Emit, Log, Place, Record, TransactionWriter
from forgemq.bus.reading import read_to_end
from forgemq.contracts.accounting import RetiredIds, is_candidate
from forgemq.contracts.audit import AuditedGroup, TreeFacts
from forgemq.contracts.completions import FinishedCompletion
from forgemq.contracts.episodes import FinishedEpisode
from forgemq.contracts.groups import RetiredGroup, ScoredGroup
from forgemq.contracts.messages import Message
from forgemq.contracts.topics import (
    AUDITED_GROUPS,
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    MERGED_TREES,
    RETIRED_GROUPS,
    SCORED_GROUPS,
    Topic,
    encode,
    needed_group,
)
from forgemq.contracts.trees import MergedTree
from forgemq.run_view.reading import message_of, read_from
from forgemq.run_view.samples import first_ends, tree_facts
from forgemq.run_view.trajectory import chosen

COMPARED: tuple[Topic, ...] = (FINISHED_COMPLETIONS, FINISHED_EPISODES, SCORED_GROUPS, MERGED_TREES)
"""What a tree is compared with; one partition of them has all of a group."""
TOPICS: tuple[Topic, ...] = (*COMPARED, RETIRED_GROUPS)

_GROUP = needed_group("console")


@dataclass(slots=True)
class GroupRecords:
    """What the log holds of one group, in the order it was read."""

    completions: list[Message] = field(default_factory=list)
    ends: list[Message] = field(default_factory=list)
    scored: ScoredGroup | None = None
    trees: list[tuple[MergedTree, str]] = field(default_factory=list)
    firsts: dict[Place, int] = field(default_factory=dict)

    def add(self, message: Message, record: Record) -> None:
        """Take in one decoded record, and the record it came from."""
        self.firsts.setdefault(record.place, record.offset)
        match message.record:
            case FinishedCompletion():
                self.completions.append(message)
            case FinishedEpisode():
                self.ends.append(message)
            case ScoredGroup() as scored:
                self.scored = scored
            case MergedTree() as tree:
                self.trees.append((tree, hashlib.sha256(record.value).hexdigest()))

    def tree_facts(self) -> tuple[TreeFacts, ...]:
        """Each tree compared with the completions, the scores and the manifests."""
        completions, ends = chosen(self.completions), first_ends(self.ends)
        return tuple(
            tree_facts(tree, sha256=sha256, completions=completions, scored=self.scored, ends=ends)
            for tree, sha256 in self.trees
        )

    def audited(self, group_id: str) -> AuditedGroup:
        """What stays of the group."""
        sampled = [
            message.record
            for message in self.completions
            if isinstance(message.record, FinishedCompletion) and is_candidate(message.record)
        ]
        versions = [span.version for completion in sampled for span in completion.spans]
        return AuditedGroup(
            group_id=group_id,
            completions=len(sampled),
            output_tokens=sum(len(completion.output) // 4 for completion in sampled),
            version_min=min(versions, default=None),
            version_max=max(versions, default=None),
            trees=self.tree_facts(),
        )


async def group_records(log: Log, starts: Mapping[Place, int]) -> dict[str, GroupRecords]:
    """Records by group from these positions of one partition to its present end."""
    groups: dict[str, GroupRecords] = {}
    async for records in read_from(log, starts):
        for record in records:
            try:
                message = message_of(record)
            except msgspec.ValidationError:
                continue  # Its readers send it to the dead letters.
            assert isinstance(
                message.record, FinishedCompletion | FinishedEpisode | ScoredGroup | MergedTree
            )
            groups.setdefault(message.record.group_id, GroupRecords()).add(message, record)
    return groups


def needed_positions(
    ends: Mapping[Place, int], *, groups: Mapping[str, GroupRecords], over: RetiredIds
) -> dict[Place, int]:
    """From where groups that are not over hold records; at most the end."""
    needed = dict(ends)
    for group_id, records in groups.items():
        if group_id not in over:
            for place, first in records.firsts.items():
                needed[place] = min(needed[place], first)
    return needed


class Auditor:
    """Audits the groups of one run as they retire.

    Lifecycle: `open`, then `audit` every now and then; a second auditor of the run fences this one.
    """

    def __init__(self, log: Log, writer: TransactionWriter, *, partitions: int) -> None:
        self._log = log
        self._writer = writer
        self._partitions = partitions
        self._over = RetiredIds()
        self._positions: dict[Place, int] = {}

    @classmethod
    async def open(cls, log: Log, *, partitions: int) -> "Auditor":
        """The only auditor from now on; knows what the ones before it have done."""
        self = cls(log, await log.transaction_writer(_GROUP), partitions=partitions)
        places = [Place(topic.name, n) for topic in TOPICS for n in range(partitions)]
        self._positions = await log.first_positions(places)
        retired = {p: at for p, at in self._positions.items() if p.topic == RETIRED_GROUPS.name}
        done = await log.committed(group=_GROUP, places=places)
        async for records in read_to_end(log, retired):
            for record in records:
                if record.offset < done.get(record.place, 0):
                    self._over.add(_retired_id(record))
        self._positions |= done
        return self

    async def audit(self) -> int:
        """Compare what has retired since the last time; returns how many groups.

        Raises:
            FencedError: another auditor of the run has started.
            LogUnavailableError: the log does not give all it has.
        """
        return sum([await self._audit(number) for number in range(self._partitions)])

    async def close(self) -> None:
        """Release the connection."""
        await self._writer.close()

    async def _audit(self, partition: int) -> int:
        retiring = Place(RETIRED_GROUPS.name, partition)
        retired: list[str] = []
        ends = await self._log.end_positions([retiring])
        async for records in read_from(self._log, {retiring: self._positions[retiring]}):
            retired += [_retired_id(each) for each in records if each.offset < ends[retiring]]
        if ends[retiring] == self._positions[retiring]:
            return 0
        # All of a retired group was written before its retirement, so before these ends.
        places = [Place(topic.name, partition) for topic in COMPARED]
        ends |= await self._log.end_positions(places)
        groups = await group_records(self._log, {place: self._positions[place] for place in places})
        fresh = [each for each in dict.fromkeys(retired) if each and each not in self._over]
        audited: list[AuditedGroup] = []
        for group_id in fresh:
            audited.append(groups.get(group_id, GroupRecords()).audited(group_id))
            self._over.add(group_id)
            # Unpacking trees is arithmetic of milliseconds each; others get their turn in between.
            await asyncio.sleep(0)
        positions = needed_positions(ends, groups=groups, over=self._over)
        await self._writer.commit(
            outputs=[_emit(each, partition) for each in audited], group=_GROUP, positions=positions
        )
        self._positions |= positions
        return len(audited)


async def unaudited(log: Log, *, partitions: int) -> dict[str, tuple[TreeFacts, ...]]:
    """Facts of the trees that no auditor has passed yet, by group, and of some that one has.

    For a group that is on audited-groups once this has returned, that record holds: its own
    records may have been trimmed meanwhile. Reads only; one partition is in memory at a time.
    """
    found: dict[str, tuple[TreeFacts, ...]] = {}
    for partition in range(partitions):
        places = [Place(topic.name, partition) for topic in COMPARED]
        starts = await log.first_positions(places)
        starts |= await log.committed(group=_GROUP, places=places)
        for group_id, records in (await group_records(log, starts)).items():
            if records.trees:
                found[group_id] = records.tree_facts()
    return found


def _retired_id(record: Record) -> str:
    """The group that this record retires; "" where it does not decode."""
    try:
        retired = message_of(record).record
    except msgspec.ValidationError:
        return ""
    assert isinstance(retired, RetiredGroup)
    return retired.group_id


def _emit(audited: AuditedGroup, partition: int) -> Emit:
    return Emit(
        topic=AUDITED_GROUPS.name,
        partition=partition,
        key=audited.group_id.encode(),
        value=encode(audited),
    )
