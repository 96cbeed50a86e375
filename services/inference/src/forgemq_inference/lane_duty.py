"""Whether this lane is to serve, by the plan of lanes on the log."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from forgemq_bus.decoding import decoded_record
from forgemq_bus.kept_records import read_from
from forgemq_bus.log import Log, Place
from forgemq_contracts import topics
from forgemq_contracts.lane_plan import LanePlan, RequestedLane, lanes_limit
from forgemq_contracts.run import LogLayout
from forgemq_telemetry import Telemetry

PLACE = Place(topics.REQUESTED_LANES.name, 0)


class LaneDuty:
    """What the plan wants of one lane.

    `removed` is set when the lane is taken out of the run. A process of a lane that the plan has
    not, or has no more when the process starts, waits with its engine ready until it is added.

    Args:
        lane: Of this process.
        layout: Of the run.
        telemetry: Of the service.
    """

    def __init__(self, lane: int, layout: LogLayout, *, telemetry: Telemetry) -> None:
        self._lane = lane
        self._plan = LanePlan(lanes=layout.lanes, lanes_max=lanes_limit(layout))
        self._telemetry = telemetry
        self.on_change: Callable[[], None] = _ignore
        self.removed = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether the lane is to serve."""
        return self._plan.serves(self._lane)

    async def restore(self, log: Log) -> int:
        """Apply the changes that are on the log; returns the position behind them.

        Every reader leaves out a record that does not decode, or their plans would differ.

        Raises:
            LogError: the log cannot be read.
        """
        start = await log.first_positions([PLACE])
        ends = await log.end_positions([PLACE])
        async for records in read_from(log, start, ends=ends):
            for record in records:
                with suppress(msgspec.ValidationError):
                    self._restore_one(decoded_record(record))
        if not self.is_wanted:
            self._telemetry.event("lane_waits", lane=self._lane)
        return ends[PLACE]

    def _restore_one(self, change: msgspec.Struct) -> None:
        assert isinstance(change, RequestedLane), type(change)
        self._plan.apply(change)

    def take(self, change: RequestedLane) -> None:
        """Apply a change that comes."""
        if self._plan.apply(change) or change.lane != self._lane:
            return
        self._telemetry.event("lane_changed", lane=self._lane, change=change.change)
        if change.change == "remove":
            self.removed.set()
        self.on_change()


def _ignore() -> None:
    return None
