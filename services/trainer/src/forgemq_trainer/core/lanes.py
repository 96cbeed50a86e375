"""To which engines the trainer offers new weights; time comes in as seconds of one clock."""

from collections.abc import Mapping

from forgemq_contracts.lanes import LaneLiveness
from forgemq_contracts.weights import ReportedEngine


class LiveLanes:
    """The lanes that live by the common rule, and how many processes each engine has."""

    def __init__(self) -> None:
        self._liveness = LaneLiveness()
        self._ranks: dict[int, int] = {}
        self._addresses: dict[int, str] = {}

    def observe(self, report: ReportedEngine, *, at_s: float) -> None:
        """Apply a heartbeat."""
        if self._liveness.observe(report, at_ms=round(at_s * 1000)):
            self._ranks[report.lane] = report.ranks
            self._addresses[report.lane] = report.weights_address

    def live(self, *, at_s: float) -> Mapping[int, int]:
        """Lane -> epoch of the live lanes."""
        return {lane.lane: lane.epoch for lane in self._liveness.live(round(at_s * 1000))}

    def addresses(self) -> Mapping[int, str]:
        """Lane -> where its process takes relayed weights; "" if it does not."""
        return self._addresses

    def ranks(self) -> Mapping[int, int]:
        """Lane -> processes of its engine, each of which receives new weights."""
        return self._ranks
