"""To which engines the trainer offers new weights; time comes in as seconds of one clock."""

from collections.abc import Mapping

from forgemq_contracts.lanes import LaneLiveness, WeightsId
from forgemq_contracts.weights import ReportedEngine
from forgemq_trainer.core.shared_members import GroupMember


class LiveLanes:
    """The lanes that live by the common rule, and what each last said of itself."""

    def __init__(self) -> None:
        self._liveness = LaneLiveness()
        self._reports: dict[int, ReportedEngine] = {}

    def observe(self, report: ReportedEngine, *, at_s: float) -> None:
        """Apply a heartbeat."""
        if self._liveness.observe(report, at_ms=round(at_s * 1000)):
            self._reports[report.lane] = report

    def is_replaced(self, lane: int, epoch: int) -> bool:
        """Whether another process has the lane, under a newer epoch than this."""
        report = self._reports.get(lane)
        return report is not None and report.epoch > epoch

    def live(self, *, at_s: float) -> Mapping[int, int]:
        """Lane -> epoch of the live lanes."""
        return {lane.lane: lane.epoch for lane in self._liveness.live(round(at_s * 1000))}

    def at(self, weights: WeightsId, *, at_s: float) -> tuple[GroupMember, ...]:
        """The live lanes that serve these weights, by number."""
        return tuple(
            GroupMember(lane.lane, lane.epoch, self._reports[lane.lane].ranks)
            for lane in self._liveness.live(round(at_s * 1000))
            if lane.weights == weights
        )

    def is_in_group(self, lane: int, name: str) -> bool:
        """Whether the lane's engine is in this process group, by its last report."""
        report = self._reports.get(lane)
        return report is not None and report.process_group == name

    def addresses(self) -> Mapping[int, str]:
        """Lane -> where its process takes relayed weights; "" if it does not."""
        return {lane: report.weights_address for lane, report in self._reports.items()}

    def ranks(self) -> Mapping[int, int]:
        """Lane -> processes of its engine, each of which receives new weights."""
        return {lane: report.ranks for lane, report in self._reports.items()}
