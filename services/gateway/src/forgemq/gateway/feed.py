"""Reads the gateway's topics: all state once at the start, then every record as it comes.

The read-back of finished-completions is the reply: a completion exists for clients when it comes
back from the log, never earlier.
"""

from collections.abc import AsyncIterator, Sequence

import msgspec

from forgemq.bus.log import Log, Place, Record
from forgemq.bus.reading import read_up_to
from forgemq.contracts import topics
from forgemq.contracts.completions import (
    CancelledCompletion,
    DeliveredCompletion,
    FinishedCompletion,
    RequestedCompletion,
)
from forgemq.contracts.episodes import FinishedEpisode, OpenedEpisode
from forgemq.contracts.groups import AdmittedGroup, RequestedGroup, RetiredGroup
from forgemq.contracts.steps import TrainedStep
from forgemq.contracts.weights import ReportedEngine
from forgemq.gateway.core.registry import Parse
from forgemq.gateway.dispatch import Dispatcher
from forgemq.gateway.surroundings import Surroundings

CONSUMES = (
    topics.REQUESTED_GROUPS,
    topics.ADMITTED_GROUPS,
    topics.RETIRED_GROUPS,
    topics.TRAINED_STEPS,
    topics.OPENED_EPISODES,
    topics.FINISHED_EPISODES,
    topics.REQUESTED_COMPLETIONS,
    topics.CANCELLED_COMPLETIONS,
    topics.FINISHED_COMPLETIONS,
    topics.DELIVERED_COMPLETIONS,
    topics.REPORTED_ENGINES,
)

# Each stage needs what the ones before it have entered; within a stage the order is free.
_STAGES = (
    (topics.REQUESTED_GROUPS, topics.ADMITTED_GROUPS, topics.RETIRED_GROUPS, topics.TRAINED_STEPS),
    (topics.OPENED_EPISODES,),
    (topics.FINISHED_EPISODES,),
    (topics.FINISHED_COMPLETIONS,),
    (topics.REQUESTED_COMPLETIONS, topics.DELIVERED_COMPLETIONS, topics.REPORTED_ENGINES),
    (topics.CANCELLED_COMPLETIONS,),
)

# Of its own records a serving gateway needs none back: it entered them when it wrote them.
_LIVE = (
    topics.ADMITTED_GROUPS,
    topics.RETIRED_GROUPS,
    topics.TRAINED_STEPS,
    topics.FINISHED_COMPLETIONS,
    topics.REPORTED_ENGINES,
)

# Nobody but the gateway reads these with the duty to bury what does not decode: the others have a
# transform or a lane that does.
_BURIED_HERE = frozenset(
    topic.name
    for topic in (topics.ADMITTED_GROUPS, topics.OPENED_EPISODES, topics.DELIVERED_COMPLETIONS)
)

_READ_S = 1.0
_RECORDS_MAX = 500


class Feed:
    """Applies records to the registry and wakes those who wait for them."""

    def __init__(
        self, log: Log, *, dispatcher: Dispatcher, parse: Parse, around: Surroundings
    ) -> None:
        self._log = log
        self._dispatcher = dispatcher
        self._parse = parse
        self._configuration = around.configuration
        self._registry = around.registry
        self._clock = around.clock
        self._changed = around.changed
        self._outbox = around.outbox
        self._telemetry = around.telemetry
        self._positions: dict[Place, int] = {}

    async def restore(self) -> None:
        """Rebuild all state from the log; on return the registry is as before the last stop."""
        started_s = self._clock.now_s()
        for stage in _STAGES:
            async for record in self._until_now(stage):
                await self._restore(record)
        for _, episode in self._registry.episodes():
            episode.renew(self._clock.now_s())
        for turn in self._registry.restored_turns():
            self._dispatcher.lanes.enter(turn.lane, turn.epoch)
        restore_s = self._clock.now_s() - started_s
        self._telemetry.observe("gateway.restore_s", restore_s)
        self._telemetry.event(
            "restored", seconds=round(restore_s, 3), groups=len(self._registry.groups)
        )

    async def _until_now(self, stage: Sequence[topics.Topic]) -> AsyncIterator[Record]:
        places = [place for topic in stage for place in self._places(topic)]
        ends = await self._log.end_positions(places)
        reader = await self._log.reader(await self._log.first_positions(places))
        try:
            async for records in read_up_to(reader, ends):
                for record in records:
                    yield record
            self._positions.update({place: reader.position(place) for place in places})
        finally:
            await reader.close()

    def _places(self, topic: topics.Topic) -> list[Place]:
        log = self._configuration.log
        count = topics.partition_count(
            topic,
            group_partitions=log.group_partitions,
            lanes=log.lanes,
            queues=len(self._configuration.queues),
        )
        return [Place(topic.name, partition) for partition in range(count)]

    async def follow(self) -> None:
        """Apply every new record, for ever."""
        live = {topic.name for topic in _LIVE}
        positions = {p: at for p, at in self._positions.items() if p.topic in live}
        reader = await self._log.reader(positions)
        try:
            while True:
                records = await reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX)
                for record in records:
                    await self._apply(record)
                if records:
                    self._changed.beat()
        finally:
            await reader.close()

    async def _restore(self, record: Record) -> None:
        decoded = await self._decoded(record)
        if decoded is not None and not self._restore_own(decoded):
            self._enter(decoded, record)

    def _restore_own(self, decoded: msgspec.Struct) -> bool:
        """Enter what this service wrote before it stopped."""
        registry = self._registry
        match decoded:
            case OpenedEpisode():
                registry.episode_opened(decoded, lease_until_s=self._clock.now_s())
            case FinishedEpisode():
                registry.episode_finished(decoded)
            case RequestedGroup():
                registry.group_requested(decoded)
            case RequestedCompletion():
                registry.completion_requested(decoded)
            case CancelledCompletion():
                registry.completion_cancelled(decoded)
            case DeliveredCompletion():
                registry.completion_delivered(decoded)
            case _:
                return False
        return True

    def _enter(self, decoded: msgspec.Struct, record: Record) -> None:
        """Enter what others wrote."""
        match decoded:
            case AdmittedGroup():
                self._registry.group_admitted(decoded)
            case RetiredGroup():
                self._registry.group_retired(decoded)
            case TrainedStep():
                self._registry.step_trained(decoded)
            case FinishedCompletion():
                self._registry.completion_finished(
                    decoded,
                    offset=record.offset,
                    finished_ms=record.timestamp_ms,
                    parse=self._parse,
                )
            case ReportedEngine():
                age_s = max(0, self._clock.wall_ms() - decoded.reported_ms) / 1000
                self._dispatcher.lanes.report(decoded, heard_s=self._clock.now_s() - age_s)

    async def _apply(self, record: Record) -> None:
        """Enter a new record and pass on what it means for open requests."""
        decoded = await self._decoded(record)
        match decoded:
            case FinishedCompletion():
                finish = self._registry.completion_finished(
                    decoded,
                    offset=record.offset,
                    finished_ms=record.timestamp_ms,
                    parse=self._parse,
                )
                if finish is not None:
                    self._dispatcher.finished(finish)
            case ReportedEngine():
                self._dispatcher.engine_reported(decoded, heard_s=self._clock.now_s())
            case RetiredGroup():
                group = self._registry.group_retired(decoded)
                if group is not None:
                    await self._dispatcher.drop_group(group)
            case None:
                if record.topic == topics.FINISHED_COMPLETIONS.name:
                    # No completion came out of it, so the turn goes to a lane again: its group
                    # need not fail. The key is the request id.
                    self._dispatcher.unreadable(record.key.decode(errors="replace"))
            case _:
                self._enter(decoded, record)

    async def _decoded(self, record: Record) -> msgspec.Struct | None:
        """The struct; None for a bad record, which has then gone to the dead letter topic.

        Every process meets a record once, while it restores or while it follows, so a bad record
        of `_BURIED_HERE` is buried once in each life of the gateway. One of any other topic is
        buried by the transform or the lane that reads it too.
        """
        try:
            return topics.decode(topics.BY_NAME[record.topic], record.value)
        except msgspec.ValidationError as error:
            if record.topic in _BURIED_HERE:
                await self._outbox.buried(record, reason=f"does not decode: {error}")
            self._telemetry.count("gateway.bad_records")
            self._telemetry.event(
                "bad_record",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                error=str(error),
            )
            return None
