"""The plan of lanes as the log has it, and those who wait for a change of it."""

import asyncio

from forgemq_contracts.lane_plan import LanePlan, RequestedLane, lanes_limit
from forgemq_contracts.run import LogLayout
from forgemq_telemetry.telemetry import Telemetry


class LaneChanges:
    """Applies every change in the order of the log, and tells its asker what became of it."""

    def __init__(self, layout: LogLayout, *, telemetry: Telemetry) -> None:
        self.lanes_max = lanes_limit(layout)
        self.plan = LanePlan(lanes=layout.lanes, lanes_max=self.lanes_max)
        self._telemetry = telemetry
        self._asked: dict[str, asyncio.Future[str]] = {}

    def restore(self, record: RequestedLane) -> None:
        """Apply a change of before the start."""
        self.plan.apply(record)

    def apply(self, record: RequestedLane) -> None:
        """Apply a change that comes; it is an event whether it holds or not."""
        refusal = self.plan.apply(record)
        self._telemetry.event(
            "lane_changed", lane=record.lane, change=record.change, refusal=refusal
        )
        asked = self._asked.get(record.change_id)
        if asked is not None and not asked.done():
            asked.set_result(refusal)

    def expect(self, change_id: str) -> "asyncio.Future[str]":
        """What `apply` says of this change, which is not written yet: '' if it holds."""
        asked = self._asked[change_id] = asyncio.get_running_loop().create_future()
        asked.add_done_callback(lambda _: self._asked.pop(change_id, None))
        return asked
