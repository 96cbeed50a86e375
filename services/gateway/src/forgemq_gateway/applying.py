"""Applies decoded records to the registry: those that were there before, and those that come."""

from collections.abc import Collection

import msgspec

from forgemq_bus.log import Record
from forgemq_contracts.completions import (
    CancelledCompletion,
    DeliveredCompletion,
    FinishedCompletion,
    RequestedCompletion,
    SampledChunk,
)
from forgemq_contracts.episodes import FinishedEpisode, OpenedEpisode
from forgemq_contracts.groups import AdmittedGroup, ClosedGroup, RequestedGroup, RetiredGroup
from forgemq_contracts.lane_plan import RequestedLane
from forgemq_contracts.ownership import OwnedRun, ReportedGateway
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.bad_records import BadRecords
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.lane_results import LaneResult
from forgemq_gateway.core.registry import Parse
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.feed_topics import COMPLETIONS
from forgemq_shell.records import group_in_header

OWNERS_CHANGED = "owners"
"""Notified on the change signal when a partition has come or gone, as the id of a group is."""


_OLD_REPORT_MS = 60_000
"""More than clocks of two machines differ by; a gateway with an older report is not there."""


class Applying:
    """One method for records at a start, which effect nothing, and one for records that come."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        parse: Parse,
        bad_records: BadRecords,
        context: GatewayContext,
    ) -> None:
        self._dispatcher = dispatcher
        self._parse = parse
        self._bad_records = bad_records
        self._registry = context.registry
        self._gateways = context.gateways
        self._clock = context.clock
        self._lane_changes = context.lane_changes
        self._changed = context.changed
        self._telemetry = context.telemetry

    def is_of_other(self, record: Record, numbers: Collection[int] | None) -> bool:
        """Whether its header names a group that is not open, or not of these partitions.

        For records about completions: most behind the mark are, since it waits for the slowest
        group, and those of all partitions share the topics of a lane.
        """
        if record.topic not in COMPLETIONS:
            return False
        group = group_in_header(record)
        if group is None:
            return False
        is_here = numbers is None or self._gateways.partition_of(group) in numbers
        return not is_here or group not in self._registry.groups

    async def decoded(self, record: Record) -> msgspec.Struct | None:
        """The record's struct; None for a bad one."""
        return await self._bad_records.decoded(record)

    def restore(self, decoded: msgspec.Struct, record: Record) -> None:
        """Apply a record that was there before this gateway read its partition."""
        registry = self._registry
        match decoded:
            case OpenedEpisode():
                lease_until_s = self._clock.now_s() + decoded.lease_s
                registry.apply_opened_episode(decoded, lease_until_s=lease_until_s)
            case FinishedEpisode():
                registry.apply_finished_episode(decoded)
            case RequestedCompletion():
                registry.apply_requested_completion(decoded)
            case CancelledCompletion():
                registry.apply_cancelled_completion(decoded)
            case FinishedCompletion():
                self._finished(decoded, record)
            case RetiredGroup():
                registry.apply_retired_group(decoded)
            case ReportedEngine():
                heard_s = self._said_s(decoded.reported_ms)
                self._dispatcher.attempts.restore_lane(decoded, heard_s=heard_s)
            case RequestedLane():
                self._lane_changes.restore(decoded)
            case ReportedGateway():
                self._hear_again(decoded)
            case _:
                self._apply_group(decoded)

    def _hear_again(self, report: ReportedGateway) -> None:
        # This process listens there now. If the clock was ahead then, an earlier one would count as
        # the later one.
        if report.url == self._gateways.url:
            return
        # Clocks of other machines say little: what is not old may be there.
        if self._clock.wall_ms() - report.reported_ms < _OLD_REPORT_MS:
            self._gateways.hear(report, heard_s=self._clock.now_s())

    async def apply(self, record: Record) -> None:
        """Apply a new record, and let the dispatcher act on results, heartbeats and retirements."""
        if self.is_of_other(record, None):
            return
        decoded = await self.decoded(record)
        if decoded is not None:
            await self._act(decoded, record)

    async def _act(self, decoded: msgspec.Struct, record: Record) -> None:
        match decoded:
            case FinishedCompletion():
                result = self._finished(decoded, record)
                if result is not None:
                    self._dispatcher.take_result(result)
            case SampledChunk():
                self._dispatcher.live.take(decoded)
            case ReportedEngine():
                self._dispatcher.take_report(decoded)
            case RequestedLane():
                self._lane_changes.apply(decoded)
            case ReportedGateway():
                self._gateways.hear(decoded, heard_s=self._clock.now_s())
                self._changed.notify(OWNERS_CHANGED)
            case RetiredGroup():
                group = self._registry.apply_retired_group(decoded)
                self._changed.notify(decoded.group_id)
                if group is not None:
                    await self._dispatcher.drop_group(group)
            case RequestedGroup() | AdmittedGroup() | ClosedGroup():
                self._apply_group(decoded)
                self._changed.notify(decoded.group_id)
            case _:
                self._apply_group(decoded)

    def _finished(self, decoded: FinishedCompletion, record: Record) -> LaneResult | None:
        return self._registry.apply_finished_completion(
            decoded, offset=record.offset, finished_ms=record.timestamp_ms, parse=self._parse
        )

    def _apply_group(self, decoded: msgspec.Struct) -> None:
        """Apply a record that means the same at any time."""
        match decoded:
            case RequestedGroup():
                self._registry.apply_requested_group(decoded)
            case AdmittedGroup():
                # First: its requests may only go to lanes that serve at least its weights.
                self._dispatcher.attempts.admit(decoded)
                self._registry.apply_admitted_group(decoded)
            case ClosedGroup():
                self._registry.apply_closed_group(decoded)
            case TrainedStep():
                self._registry.apply_trained_step(decoded)
            case DeliveredCompletion():
                self._registry.apply_delivered_completion(decoded)
            case OwnedRun():
                self._take_owners(decoded)

    def _take_owners(self, record: OwnedRun) -> None:
        _, lost = self._gateways.take_owners(record)
        if lost:
            self._telemetry.event("lost", partitions=sorted(lost), owner=record.owner)
            self._dispatcher.move(lost)
        self._changed.notify(OWNERS_CHANGED)

    def _said_s(self, reported_ms: int) -> float:
        """When a report of before this start was made, on this process's clock."""
        age_s = max(0, self._clock.wall_ms() - reported_ms) / 1000
        return self._clock.now_s() - age_s
