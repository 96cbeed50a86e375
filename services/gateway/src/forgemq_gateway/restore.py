"""Reads what was on the log before: groups of the whole run, and episodes of what a gateway gains.

A start knows from the owners' record which groups were ever requested. It begins where `marks.py`
has committed, since earlier records belong to retired groups. Trained steps are read in full,
retired groups further back for their reasons and results, heartbeats only at their end.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence

import msgspec

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.log import Log, Place, Record
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.completions import (
    DeliveredCompletion,
    FinishedCompletion,
    RequestedCompletion,
)
from forgemq_contracts.domains import has_live_streams
from forgemq_contracts.groups import RetiredGroup
from forgemq_contracts.ownership import OwnedRun
from forgemq_contracts.topic import Topic
from forgemq_gateway import ownership
from forgemq_gateway.applying import Applying
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.gateways import LAPSE_S
from forgemq_gateway.core.registry import RETIRED_STATUSES_MAX
from forgemq_gateway.feed_topics import (
    BY_GROUP,
    FOLLOWED,
    FOLLOWED_FROM_NOW,
    GROUPS,
    PARTITION_STAGES,
    RUN_STAGES,
)
from forgemq_gateway.marks import NEEDED_GROUP

_NAMES_EPISODE = (FinishedCompletion, RequestedCompletion, DeliveredCompletion)

_REPORTS_READ_MAX = 200
"""Heartbeats of each lane, and of all gateways, that a start reads: some minutes of them."""

_REPORTS = (topics.REPORTED_ENGINES.name, topics.REPORTED_GATEWAYS.name)


class Restore:
    """Applies records up to now; nothing that it applies has an effect on lanes or clients."""

    def __init__(self, log: Log, *, applying: Applying, context: GatewayContext) -> None:
        self._log = log
        self._applying = applying
        self._configuration = context.configuration
        self._registry = context.registry
        self._read_back = context.read_back
        self._asked_before: Sequence[int] = ()
        self._known_from: dict[Place, int] = {}
        """By partition of retired groups; of those before, only a result counts."""
        self._has_curriculum = any(q.curriculum is not None for q in self._configuration.queues)

    async def run(self, newest: OwnedRun | None) -> dict[Place, int]:
        """Apply what every gateway knows; returns from where it is to be followed.

        Args:
            newest: The newest record of owners; None if the run had no gateway.
        """
        if newest is not None:
            self._registry.asked.restore(newest.asked_keys)
            self._asked_before = newest.asked_before
        positions: dict[Place, int] = {}
        for stage in RUN_STAGES:
            places = self._places(stage)
            positions |= await self._apply(places, ends=await self._log.end_positions(places))
        self._registry.forget_retired()
        return positions

    async def starts(self) -> dict[Place, int]:
        """From where a start would read all records of groups now."""
        places = self._places(BY_GROUP)
        return await self._starts(places, ends=await self._log.end_positions(places))

    async def partitions(self, numbers: Collection[int]) -> dict[Place, int]:
        """Apply all records about episodes of these group partitions, while the feed follows.

        Returns:
            From where they are to be followed.
        """
        ends: dict[Place, int] = {}
        # The ends of later stages first: what they refer to then lies before the ends of earlier
        # ones. The same holds for the groups, which the feed reads.
        for stage in reversed(PARTITION_STAGES):
            ends |= await self._log.end_positions(self._places(stage, numbers))
        # A group that the previous owner promised may lie behind another gateway's transaction. If
        # that one stands still it has lapsed by then, and the next try ends its transaction.
        await self._read_back.until_now(
            self._places(GROUPS), wait_s=LAPSE_S, isolation="uncommitted"
        )
        positions: dict[Place, int] = {}
        for stage in PARTITION_STAGES:
            places = self._places(stage, numbers)
            positions |= await self._apply(places, ends=ends, numbers=numbers)
        followed = {topic.name for topic in FOLLOWED}
        restored = {place: at for place, at in positions.items() if place.topic in followed}
        return restored | await self._log.end_positions(self.places_from_now(numbers))

    def places_from_now(self, numbers: Collection[int] | None = None) -> list[Place]:
        """Partitions of which nothing is restored."""
        is_used = has_live_streams(self._configuration)
        return self._places(FOLLOWED_FROM_NOW, numbers) if is_used else []

    def _places(self, of: Sequence[Topic], numbers: Collection[int] | None = None) -> list[Place]:
        """All partitions of these topics; of those by group only these `numbers`."""
        return [
            place
            for topic in of
            for place in partitions_of(topic, self._configuration)
            if numbers is None or topic.partitioned_by != "group" or place.partition in numbers
        ]

    async def _apply(
        self,
        places: Sequence[Place],
        *,
        ends: Mapping[Place, int],
        numbers: Collection[int] | None = None,
    ) -> dict[Place, int]:
        """Apply these partitions up to their ends; returns the positions behind what was read."""
        reader = await self._log.reader(await self._starts(places, ends=ends))
        try:
            async for records in read_up_to(reader, {place: ends[place] for place in places}):
                for record in records:
                    await self._apply_one(record, numbers)
                    # Groups that this gateway serves already are answered between two records.
                    await asyncio.sleep(0)
            return {place: reader.position(place) for place in places}
        finally:
            await reader.close()

    async def _apply_one(self, record: Record, numbers: Collection[int] | None) -> None:
        if self._applying.is_of_other(record, numbers):
            return
        decoded = await self._applying.decoded(record)
        if isinstance(decoded, RetiredGroup) and record.offset < self._known_from[record.place]:
            self._registry.apply_result(decoded)
        elif decoded is not None and not self._has_ended(decoded):
            self._applying.restore(decoded, record)

    async def _starts(
        self, places: Sequence[Place], *, ends: Mapping[Place, int]
    ) -> dict[Place, int]:
        """Where each partition is read from: the committed mark, or its beginning."""
        by_group = {topic.name for topic in BY_GROUP}
        starts = await self._log.first_positions(places)
        needed = await self._log.committed(
            group=NEEDED_GROUP, places=[place for place in places if place.topic in by_group]
        )
        for place, first in starts.items():
            start = needed.get(place, first)
            if place.topic == topics.REQUESTED_GROUPS.name:
                start = min(start, self._unasked_from(place))
            if place.topic == topics.RETIRED_GROUPS.name:
                start = min(start, ends[place] - self._statuses_max)
                self._known_from[place] = start
                if self._has_curriculum:
                    start = first  # Its results are served for the life of the run.
            if place.topic in _REPORTS:
                start = ends[place] - _REPORTS_READ_MAX
            if place == ownership.PLACE:
                start = await ownership.tail_start(self._log)
            starts[place] = max(first, start)
        return starts

    @property
    def _statuses_max(self) -> int:
        """Of each partition as many: all of one would leave no place for those of another."""
        partitions = topics.partition_count(topics.RETIRED_GROUPS, self._configuration)
        return RETIRED_STATUSES_MAX // partitions

    def _unasked_from(self, place: Place) -> int:
        """From where on requested groups are not among the keys of the owners' record."""
        before = self._asked_before
        return before[place.partition] if place.partition < len(before) else 0

    def _has_ended(self, decoded: msgspec.Struct) -> bool:
        """Whether it is about an episode whose final record is on the log."""
        return isinstance(decoded, _NAMES_EPISODE) and self._registry.has_ended(decoded.episode_id)
