"""Compares every group with its records once it has retired, while they are all on the log.

The result stays on audited-groups for the run's life; the records themselves may then be trimmed.
A partition is audited in rounds of a bounded size, each committed: a round fits in memory however
long no auditor ran, and a process that dies loses one round.
"""

import asyncio
from collections.abc import Iterable, Mapping

import msgspec

from forgemq_audit.group_index import COMPARED, ROUND_LIMITS, GroupIndex, RoundLimits
from forgemq_audit.unaudited import AUDITOR_NEEDED
from forgemq_bus.bounded_reads import read_to_end
from forgemq_bus.kept_records import message_of, read_from
from forgemq_bus.log import Emit, Log, Place, Record, TransactionWriter
from forgemq_contracts.accounting import RetiredIds
from forgemq_contracts.groups import RetiredGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import AUDITED_GROUPS, RETIRED_GROUPS, Topic
from forgemq_shell.records import emit_of

TOPICS: tuple[Topic, ...] = (*COMPARED, RETIRED_GROUPS)


class AuditRound(msgspec.Struct, frozen=True, kw_only=True):
    """What one round has done."""

    groups: int
    has_more: bool


class _Backlog:
    """The groups of one partition that retired and are not audited, and where their records are."""

    def __init__(self, log: Log, partition: int, positions: Mapping[Place, int]) -> None:
        self.retiring = Place(RETIRED_GROUPS.name, partition)
        self.index = GroupIndex(
            log, {place: positions[place] for place in _places(COMPARED, partition)}
        )
        self._log = log
        self._waiting: dict[str, int] = {}  # By group, the position behind its retirement.
        self._next = positions[self.retiring]

    async def read_on(self, over: RetiredIds) -> None:
        """Take in the records that are new."""
        ends = await self._log.end_positions([self.retiring])
        async for records in read_from(self._log, {self.retiring: self._next}, ends=ends):
            for record in records:
                group_id = _retired_id(record)
                if group_id and group_id not in over and record.offset < ends[self.retiring]:
                    self._waiting.setdefault(group_id, record.offset + 1)
        self._next = ends[self.retiring]
        # All of a group was written before its retirement, so what is waiting is indexed in full.
        await self.index.read_on(over=over)

    def fitting(self, limits: RoundLimits) -> list[str]:
        """The groups of the next round, in the order they retired."""
        return self.index.fitting(self._waiting, limits)

    def positions(self, taken: list[str]) -> dict[Place, int]:
        """Where the next auditor begins once these are audited."""
        is_all = len(taken) == len(self._waiting)
        behind = self._next if is_all else self._waiting[taken[-1]]
        return {self.retiring: behind, **self.index.needed(without=taken)}

    def forget(self, group_ids: Iterable[str]) -> None:
        """Drop groups that are audited."""
        for group_id in group_ids:
            del self._waiting[group_id]
        self.index.forget(group_ids)

    def __len__(self) -> int:
        """Groups that are not audited yet."""
        return len(self._waiting)


class GroupAudit:
    """Audits the groups of one run as they retire.

    Lifecycle: `open`, then `audit` at intervals, and at once if it has more. After an error
    open a new one: it goes on from what was committed. A second auditor of the run fences this one.
    """

    def __init__(
        self,
        log: Log,
        writer: TransactionWriter,
        *,
        configuration: RunConfiguration,
        limits: RoundLimits,
    ) -> None:
        self._configuration = configuration
        self._log = log
        self._writer = writer
        self._limits = limits
        self._over = RetiredIds()
        self._committed: dict[Place, int] = {}
        self._backlogs: list[_Backlog] = []

    @classmethod
    async def open(
        cls, log: Log, *, configuration: RunConfiguration, limits: RoundLimits = ROUND_LIMITS
    ) -> "GroupAudit":
        """Fence every older auditor of the run and take up what they committed."""
        writer = await log.transaction_writer(AUDITOR_NEEDED)
        self = cls(log, writer, configuration=configuration, limits=limits)
        partitions = configuration.log.group_partitions
        places = [place for n in range(partitions) for place in _places(TOPICS, n)]
        positions = await log.first_positions(places)
        retired = {p: at for p, at in positions.items() if p.topic == RETIRED_GROUPS.name}
        self._committed = await log.committed(group=AUDITOR_NEEDED, places=places)
        async for records in read_to_end(log, retired):
            for record in records:
                if record.offset < self._committed.get(record.place, 0):
                    self._over.add(_retired_id(record))
        positions |= self._committed
        self._backlogs = [_Backlog(log, n, positions) for n in range(partitions)]
        return self

    async def audit(self) -> AuditRound:
        """Compare what has retired, one round of bounded size in each partition.

        Raises:
            FencedError: another auditor of the run has started.
            LogUnavailableError: the log does not give all it has.
        """
        groups = sum([await self._audit(backlog) for backlog in self._backlogs])
        return AuditRound(groups=groups, has_more=any(self._backlogs))

    async def close(self) -> None:
        """Release the connection."""
        await self._writer.close()

    async def _audit(self, backlog: _Backlog) -> int:
        await backlog.read_on(self._over)
        taken = backlog.fitting(self._limits)
        positions = backlog.positions(taken)
        if positions[backlog.retiring] == self._committed.get(backlog.retiring, 0):
            return 0
        groups = await backlog.index.records_of(taken)
        outputs: list[Emit] = []
        for group_id in taken:
            audited = groups.pop(group_id).audited(group_id, self._configuration)
            output = Output(
                topic=AUDITED_GROUPS.name, partition=backlog.retiring.partition, record=audited
            )
            outputs.append(emit_of(output))
            # Unpacking one tree takes milliseconds; the other tasks of the process run in between.
            await asyncio.sleep(0)
        await self._writer.commit(outputs=outputs, group=AUDITOR_NEEDED, positions=positions)
        self._committed |= positions
        for group_id in taken:
            self._over.add(group_id)
        backlog.forget(taken)
        return len(taken)


def _places(topics: Iterable[Topic], partition: int) -> list[Place]:
    return [Place(topic.name, partition) for topic in topics]


def _retired_id(record: Record) -> str:
    """The group that this record retires; "" if the record does not decode."""
    try:
        retired = message_of(record).record
    except msgspec.ValidationError:
        return ""
    assert isinstance(retired, RetiredGroup)
    return retired.group_id
