"""Which weights the lanes serve, as the scheduler may rely on it."""

from msgspec import Struct

from forgemq_contracts.weights import LANE_LAPSE_S, LoadedWeights, ReportedEngine

LANE_SILENCE_MAX_MS = round(LANE_LAPSE_S * 1000)
"""A lane without a heartbeat for longer (run time) is dead and holds nobody up."""


class ReportedLane(Struct, frozen=True, kw_only=True):
    """The newest that one lane said; weights never go back within an epoch."""

    lane: int
    epoch: int
    is_serving: bool
    weights: tuple[int, int]  # lineage, version
    heard_ms: int


class ServedLanes:
    """Lanes by number, and the newest weights that every live lane served at one moment.

    `served` never goes back within a lineage: a lane that starts late or on the base model takes
    no requests until it has caught up, so it makes no stale tokens.

    Example: lanes 0 and 1 report (1, 3) and (1, 4): served is (1, 3). Lane 0 dies: 5 s later
    served is (1, 4). Lane 0 comes back with (0, 0): served stays (1, 4), and rises again only
    when lane 0 serves more than that.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, ReportedLane] = {}
        self._now_ms = 0
        self.served: tuple[int, int] | None = None

    def on_time(self, now_ms: int) -> None:
        """Run time has come this far; silent lanes die."""
        self._now_ms = max(self._now_ms, now_ms)
        self._advance()

    def on_report(self, report: ReportedEngine) -> None:
        """A heartbeat; one of an older epoch changes nothing."""
        known = self._lanes.get(report.lane)
        if known is not None and report.epoch < known.epoch:
            return
        weights = (report.lineage, report.version)
        if known is not None and report.epoch == known.epoch:
            weights = max(weights, known.weights)
        self._lanes[report.lane] = ReportedLane(
            lane=report.lane,
            epoch=report.epoch,
            is_serving=report.is_serving,
            weights=weights,
            heard_ms=self._now_ms,
        )
        self._advance()

    def on_loaded(self, loaded: LoadedWeights) -> None:
        """A lane serves newer weights; a lane that never reported stays not live."""
        known = self._lanes.get(loaded.lane)
        weights = (loaded.lineage, loaded.version)
        if known is None or loaded.epoch > known.epoch:
            known = ReportedLane(
                lane=loaded.lane,
                epoch=loaded.epoch,
                is_serving=False,
                weights=weights,
                heard_ms=self._now_ms,
            )
        elif loaded.epoch < known.epoch:
            return
        self._lanes[loaded.lane] = ReportedLane(
            lane=known.lane,
            epoch=known.epoch,
            is_serving=known.is_serving,
            weights=max(weights, known.weights),
            heard_ms=known.heard_ms,
        )
        self._advance()

    @property
    def is_any_live(self) -> bool:
        """Whether some engine could generate now."""
        return bool(self._live())

    def version(self) -> int | None:
        """No token of a group admitted now is older than this; None: no lane ever served.

        After a trainer restart the newer lineage may begin at an older version; a lane that is
        there already counts with that one.
        """
        if self.served is None:
            return None
        lineage, version = self.served
        newer = (lane.weights[1] for lane in self._live() if lane.weights[0] > lineage)
        return min([version, *newer])

    def states(self) -> tuple[ReportedLane, ...]:
        """All lanes by number."""
        return tuple(self._lanes[lane] for lane in sorted(self._lanes))

    def restore(
        self, states: tuple[ReportedLane, ...], *, served: tuple[int, int] | None, now_ms: int
    ) -> None:
        """Replace all state."""
        self._lanes = {state.lane: state for state in states}
        self.served = served
        self._now_ms = now_ms

    def _live(self) -> list[ReportedLane]:
        """Lanes that serve and were heard of lately."""
        oldest_ms = self._now_ms - LANE_SILENCE_MAX_MS
        return [
            lane for lane in self._lanes.values() if lane.is_serving and lane.heard_ms >= oldest_ms
        ]

    def _advance(self) -> None:
        oldest = min((lane.weights for lane in self._live()), default=None)
        if oldest is not None and (self.served is None or oldest > self.served):
            self.served = oldest
