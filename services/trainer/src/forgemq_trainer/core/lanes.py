"""Which engines are alive, from what they report; time comes in as seconds of one clock."""

from collections.abc import Mapping

from forgemq_contracts.weights import ReportedEngine


class LiveLanes:
    """The newest report of each lane.

    Example: lane 0 reports at 10.0 s; with a timeout of 5 s it is live until 15.0 s, and gone at
    once when it reports that it does not serve, or when a newer epoch takes its place.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._newest: dict[int, tuple[ReportedEngine, float]] = {}

    def observe(self, report: ReportedEngine, *, at_s: float) -> None:
        """Note a report; an older epoch than the newest is a zombie and ignored."""
        known = self._newest.get(report.lane)
        if known is None or known[0].epoch <= report.epoch:
            self._newest[report.lane] = (report, at_s)

    def live(self, *, at_s: float) -> Mapping[int, int]:
        """Lane -> epoch of the lanes that serve and reported lately."""
        return {
            lane: report.epoch
            for lane, (report, seen_s) in sorted(self._newest.items())
            if report.is_serving and at_s - seen_s <= self._timeout_s
        }

    def ranks(self) -> Mapping[int, int]:
        """Lane -> processes of its engine, each of which receives new weights."""
        return {lane: report.ranks for lane, (report, _) in self._newest.items()}
