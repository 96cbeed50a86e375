"""What the gateway of the attempts world has heard of its lanes, by a rule of the test's own."""

import msgspec

from forgemq_contracts.lanes import LANE_LAPSE_MS
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.lanes import SILENCE_S


class Heard(msgspec.Struct):
    """The newest heartbeat of a lane that the gateway got."""

    report: ReportedEngine
    at_ms: int


class Hearing:
    """The newest heartbeat of each lane, and when all of them were silent."""

    def __init__(self) -> None:
        self.lanes: dict[int, Heard] = {}
        self.newest_ms = self.resumed_ms = 0

    def note(self, report: ReportedEngine, *, at_ms: int) -> None:
        known = self.lanes.get(report.lane)
        if known is None or report.epoch >= known.report.epoch:
            self.lanes[report.lane] = Heard(report, at_ms)
            self.note_time(at_ms)

    def note_time(self, at_ms: int) -> None:
        if at_ms - self.newest_ms > SILENCE_S * 1000:
            self.resumed_ms = at_ms
        self.newest_ms = max(self.newest_ms, at_ms)

    def note_restart(self) -> None:
        """A restarted gateway reads the newest heartbeat of each lane, and nothing between them."""
        self.newest_ms = self.resumed_ms = 0
        for heard in self.lanes.values():
            self.note_time(heard.at_ms)

    def epoch(self, lane: int) -> int:
        return self.lanes[lane].report.epoch

    def is_heard(self, lane: int, epoch: int, *, now_ms: int) -> bool:
        known = self.lanes.get(lane)
        is_known = known is not None and known.report.epoch == epoch
        return is_known and now_ms - known.at_ms <= LANE_LAPSE_MS

    def is_live(self, lane: int, epoch: int, *, now_ms: int) -> bool:
        is_heard = self.is_heard(lane, epoch, now_ms=now_ms)
        return is_heard and self.lanes[lane].report.is_serving

    def holds(self, lane: int, epoch: int, *, now_ms: int) -> bool:
        """As `is_heard`; the silence of a lane counts from where not all of them were silent."""
        known = self.lanes.get(lane)
        if known is None or known.report.epoch != epoch:
            return False
        is_silence = now_ms - self.newest_ms > SILENCE_S * 1000
        return is_silence or now_ms - max(known.at_ms, self.resumed_ms) <= LANE_LAPSE_MS
