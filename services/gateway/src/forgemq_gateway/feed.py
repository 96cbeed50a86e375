"""Reads the gateway's topics: the open groups once at the start, then every record as it comes.

A client gets a completion when it comes back from finished-completions, never earlier: the record
on the log is the reply.

A restart takes the run over (`ownership.py`), which also says which groups were ever requested. It
then begins where `marks.py` has committed, since earlier records belong to retired groups. Trained
steps are read in full, retired groups further back for their reasons, heartbeats only at their end.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.decoding import decoded_record
from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_bus.log import Log, Place, Record
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.completions import (
    CancelledCompletion,
    DeliveredCompletion,
    FinishedCompletion,
    RequestedCompletion,
)
from forgemq_contracts.episodes import FinishedEpisode, OpenedEpisode
from forgemq_contracts.groups import AdmittedGroup, ClosedGroup, RequestedGroup, RetiredGroup
from forgemq_contracts.ownership import OwnedRun
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway import ownership
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.registry import RETIRED_STATUSES_MAX, Parse
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.marks import FIRST_RECORDS, NEEDED_GROUP, Marks
from forgemq_gateway.ownership import Claimed, KeptKeys, claim_run
from forgemq_shell.records import group_of

CONSUMES = (
    topics.REQUESTED_GROUPS,
    topics.ADMITTED_GROUPS,
    topics.CLOSED_GROUPS,
    topics.RETIRED_GROUPS,
    topics.TRAINED_STEPS,
    topics.OPENED_EPISODES,
    topics.FINISHED_EPISODES,
    topics.REQUESTED_COMPLETIONS,
    topics.CANCELLED_COMPLETIONS,
    topics.FINISHED_COMPLETIONS,
    topics.DELIVERED_COMPLETIONS,
    topics.REPORTED_ENGINES,
    topics.OWNED_RUNS,
)

# Each stage needs what earlier stages have applied; within a stage the order does not matter.
_STAGES = (
    (topics.REQUESTED_GROUPS, topics.ADMITTED_GROUPS, topics.RETIRED_GROUPS, topics.TRAINED_STEPS),
    (topics.OPENED_EPISODES, topics.CLOSED_GROUPS),
    (topics.FINISHED_EPISODES,),
    (topics.FINISHED_COMPLETIONS,),
    (topics.REQUESTED_COMPLETIONS, topics.DELIVERED_COMPLETIONS, topics.REPORTED_ENGINES),
    (topics.CANCELLED_COMPLETIONS,),
)

# Restored after groups and ends of episodes: only those of open episodes are of use.
_COMPLETIONS = frozenset(
    topic.name
    for topic in (
        topics.FINISHED_COMPLETIONS,
        topics.REQUESTED_COMPLETIONS,
        topics.DELIVERED_COMPLETIONS,
        topics.CANCELLED_COMPLETIONS,
    )
)

_NAMES_EPISODE = (FinishedCompletion, RequestedCompletion, DeliveredCompletion)

# On these topics, all records of a group are written after its first one (`FIRST_RECORDS`).
_BY_GROUP = (
    topics.REQUESTED_GROUPS,
    topics.ADMITTED_GROUPS,
    topics.CLOSED_GROUPS,
    topics.RETIRED_GROUPS,
    topics.OPENED_EPISODES,
    topics.FINISHED_EPISODES,
    topics.REQUESTED_COMPLETIONS,
    topics.CANCELLED_COMPLETIONS,
    topics.FINISHED_COMPLETIONS,
    topics.DELIVERED_COMPLETIONS,
)

# A serving gateway applies its own records when it writes them. It reads back only requested
# groups, to know how far it has read them (`FIRST_RECORDS`).
_LIVE = (
    topics.REQUESTED_GROUPS,
    topics.ADMITTED_GROUPS,
    topics.CLOSED_GROUPS,
    topics.RETIRED_GROUPS,
    topics.TRAINED_STEPS,
    topics.FINISHED_COMPLETIONS,
    topics.REPORTED_ENGINES,
)

# A read returns as soon as a record comes; the wait only bounds how long an idle read lasts.
_READ_S = 1.0

# A second of records on a busy run; other tasks run between two reads.
_RECORDS_MAX = 500

_REPORTS_READ_MAX = 200
"""Heartbeats of each lane that a start reads: some minutes of them."""

_LETTER_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Between two attempts to write a dead letter, the last one from then on. Each attempt tries for
the seconds that the log allows a write, so more would only fill the service's lines."""


class Feed:
    """Applies records to the registry and gives results and heartbeats to the dispatcher.

    Args:
        ready: Cleared while a bad record waits for its dead letter.
    """

    def __init__(
        self,
        log: Log,
        *,
        dispatcher: Dispatcher,
        parse: Parse,
        context: GatewayContext,
        ready: asyncio.Event,
    ) -> None:
        self._log = log
        self._dispatcher = dispatcher
        self._parse = parse
        self._configuration = context.configuration
        self._registry = context.registry
        self._clock = context.clock
        self._changed = context.changed
        self._outbox = context.outbox
        self._telemetry = context.telemetry
        self._mark_every_s = context.settings.mark_every_s
        self._ready = ready
        self._positions: dict[Place, int] = {}
        self._starts: dict[Place, int] = {}
        self._first_read: dict[Place, int] = {}
        self._claimed: Claimed | None = None

    async def restore(self, *, url: str) -> None:
        """Take the run over and rebuild all open groups as they were at the previous stop.

        Args:
            url: Where this gateway answers.
        """
        started_s = self._clock.now_s()
        run = self._configuration.run
        self._claimed = await claim_run(self._log, run=run, url=url, at_ms=self._clock.wall_ms())
        self._registry.asked.restore(self._claimed.record.asked_keys)
        for stage in _STAGES:
            async for record in self._until_now(stage):
                await self._restore(record)
        self._registry.renew_leases(self._clock.now_s())
        self._dispatcher.attempts.restore(self._registry.take_restored_turns())
        self._first_read = {p: at for p, at in self._positions.items() if p.topic in FIRST_RECORDS}
        self._registry.forget_retired()
        restore_s = self._clock.now_s() - started_s
        self._telemetry.observe("gateway.restore_s", restore_s)
        self._telemetry.event(
            "restored",
            seconds=round(restore_s, 3),
            groups=len(self._registry.groups),
            completions=sum(
                len(episode.history.completions) for _, episode in self._registry.episodes()
            ),
            owner=self._claimed.record.owner,
        )

    async def _until_now(self, stage: Sequence[topics.Topic]) -> AsyncIterator[Record]:
        places = [place for topic in stage for place in partitions_of(topic, self._configuration)]
        ends = await self._log.end_positions(places)
        starts = await self._needed_starts(places, ends=ends)
        self._starts |= starts
        reader = await self._log.reader(starts)
        try:
            async for records in read_up_to(reader, ends):
                for record in records:
                    yield record
            self._positions.update({place: reader.position(place) for place in places})
        finally:
            await reader.close()

    async def _needed_starts(
        self, places: Sequence[Place], *, ends: Mapping[Place, int]
    ) -> dict[Place, int]:
        """Where each partition is read from: the committed mark, or its beginning."""
        by_group = {topic.name for topic in _BY_GROUP}
        starts = await self._log.first_positions(places)
        needed = await self._log.committed(
            group=NEEDED_GROUP, places=[place for place in places if place.topic in by_group]
        )
        for place, first in starts.items():
            start = needed.get(place, first)
            if place.topic == topics.REQUESTED_GROUPS.name:
                start = min(start, self._asked_before(place))
            if place.topic == topics.RETIRED_GROUPS.name:
                start = min(start, ends[place] - RETIRED_STATUSES_MAX)
            if place.topic == topics.REPORTED_ENGINES.name:
                start = ends[place] - _REPORTS_READ_MAX
            starts[place] = max(first, start)
        return starts

    def _asked_before(self, place: Place) -> int:
        """From where on requested groups are not among the keys of the claim."""
        assert self._claimed is not None, "the claim comes first"
        before = self._claimed.record.asked_before
        return before[place.partition] if place.partition < len(before) else 0

    async def follow(self) -> None:
        """Apply new records until cancelled."""
        live = {topic.name for topic in _LIVE}
        positions = {p: at for p, at in self._positions.items() if p.topic in live}
        assert self._claimed is not None, "`restore` comes first"
        positions[ownership.PLACE] = self._claimed.position
        reader = await self._log.reader(positions)
        try:
            while True:
                records = await reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX)
                for record in records:
                    await self._apply(record)
                self._first_read |= {place: reader.position(place) for place in self._first_read}
                await self._outbox.claim.read_up_to(reader.position(ownership.PLACE))
                self._registry.forget_retired()
        finally:
            await reader.close()

    async def keep_marks(self) -> None:
        """Commit until cancelled where a restart must begin to read."""
        run = self._configuration
        places = [place for topic in _BY_GROUP for place in partitions_of(topic, run)]
        assert self._claimed is not None, "`restore` comes first"
        kept = KeptKeys(self._claimed, clock=self._clock, asked=self._registry.asked)
        requested = partitions_of(topics.REQUESTED_GROUPS, run)
        await Marks(
            self._log,
            starts={
                ownership.PLACE: self._claimed.position,
                **{place: self._starts[place] for place in places},
            },
            first_read=self._first_read,
            open_groups=self._registry.groups,
            every_s=self._mark_every_s,
            telemetry=self._telemetry,
            kept=lambda: kept.due(read_before=[self._first_read[place] for place in requested]),
        ).keep()

    async def _restore(self, record: Record) -> None:
        if self._is_of_retired(record):
            return
        decoded = await self._decoded(record)
        if isinstance(decoded, _NAMES_EPISODE) and self._registry.has_ended(decoded.episode_id):
            return
        if decoded is not None and not self._apply_own(decoded):
            self._apply_foreign(decoded, record)

    def _is_of_retired(self, record: Record) -> bool:
        """Whether its header names a group that is not open, for a record about a completion.

        Most records behind the mark are: it waits for the slowest group.
        """
        if record.topic not in _COMPLETIONS:
            return False
        group = group_of(record)
        return group is not None and group not in self._registry.groups

    def _apply_own(self, decoded: msgspec.Struct) -> bool:
        """Apply a record that the gateway wrote; False if another service wrote it."""
        registry = self._registry
        match decoded:
            case OpenedEpisode():
                registry.apply_opened_episode(decoded, lease_until_s=self._clock.now_s())
            case FinishedEpisode():
                registry.apply_finished_episode(decoded)
            case RequestedCompletion():
                registry.apply_requested_completion(decoded)
            case CancelledCompletion():
                registry.apply_cancelled_completion(decoded)
            case DeliveredCompletion():
                registry.apply_delivered_completion(decoded)
            case _:
                return False
        return True

    def _apply_foreign(self, decoded: msgspec.Struct, record: Record) -> None:
        """Apply a record that another service wrote."""
        match decoded:
            case RequestedGroup():
                self._registry.apply_requested_group(decoded)
            case AdmittedGroup():
                # First: its requests may only go to lanes that serve at least its weights.
                self._dispatcher.attempts.admit(decoded)
                self._registry.apply_admitted_group(decoded)
            case ClosedGroup():
                self._registry.apply_closed_group(decoded)
            case RetiredGroup():
                self._registry.apply_retired_group(decoded)
            case TrainedStep():
                self._registry.apply_trained_step(decoded)
            case FinishedCompletion():
                self._registry.apply_finished_completion(
                    decoded,
                    offset=record.offset,
                    finished_ms=record.timestamp_ms,
                    parse=self._parse,
                )
            case ReportedEngine():
                age_s = max(0, self._clock.wall_ms() - decoded.reported_ms) / 1000
                heard_s = self._clock.now_s() - age_s
                self._dispatcher.attempts.restore_lane(decoded, heard_s=heard_s)

    async def _apply(self, record: Record) -> None:
        """Apply a new record, and let the dispatcher act on results, heartbeats and retirements."""
        decoded = await self._decoded(record)
        match decoded:
            case FinishedCompletion():
                result = self._registry.apply_finished_completion(
                    decoded,
                    offset=record.offset,
                    finished_ms=record.timestamp_ms,
                    parse=self._parse,
                )
                if result is not None:
                    self._dispatcher.take_result(result)
            case ReportedEngine():
                self._dispatcher.take_report(decoded)
            case OwnedRun():
                assert self._claimed is not None, "`restore` comes first"
                self._claimed.check(decoded)
            case RetiredGroup():
                group = self._registry.apply_retired_group(decoded)
                self._changed.notify(decoded.group_id)
                if group is not None:
                    await self._dispatcher.drop_group(group)
            case RequestedGroup() | AdmittedGroup() | ClosedGroup():
                self._apply_foreign(decoded, record)
                self._changed.notify(decoded.group_id)
            case None:
                pass
            case _:
                self._apply_foreign(decoded, record)

    async def _decoded(self, record: Record) -> msgspec.Struct | None:
        """Decode a record; None for a bad one, which becomes a dead letter.

        The scheduler then retires the group, and that ends its open turns like any retirement.
        """
        try:
            return decoded_record(record)
        except msgspec.ValidationError as error:
            has_dead_letter = await self._bury(record, reason=f"does not decode: {error}")
            self._telemetry.count("gateway.bad_records")
            self._telemetry.event(
                "bad_record" if has_dead_letter else "bad_record_skipped",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                error=str(error),
            )
            return None

    async def _bury(self, record: Record, *, reason: str) -> bool:
        """Write a bad record's dead letter; False if another service does.

        Tries until the log takes it, and the gateway is not ready meanwhile: no later record is
        applied before, because a restart might begin behind the bad one. A new start would only
        meet the same record.
        """
        pauses_s = iter(_LETTER_PAUSES_S)
        was_ready = self._ready.is_set()
        while True:
            try:
                has_dead_letter = await self._outbox.write_dead_letter(record, reason=reason)
            except FINAL_ERRORS:
                raise
            except LogError as error:
                self._ready.clear()
                self._telemetry.event(
                    "dead_letter_failed",
                    topic=record.topic,
                    partition=record.partition,
                    offset=record.offset,
                    error=f"{type(error).__name__}: {error}",
                )
                await asyncio.sleep(next(pauses_s, _LETTER_PAUSES_S[-1]))
            else:
                if was_ready:
                    self._ready.set()
                return has_dead_letter
