"""The lanes as the scheduler knows them, in run time, and the version it may admit groups under."""

from forgemq_contracts.lanes import KnownLane, LaneLiveness, WeightsId
from forgemq_contracts.weights import LoadedWeights, ReportedEngine


class ServedLanes:
    """The common rule of liveness with run time as its clock.

    Run time comes in ticks: two heartbeats between two ticks were heard at the same moment.
    """

    def __init__(self) -> None:
        self._lanes = LaneLiveness()
        self._now_ms = 0
        # Asked several times for each record; computed again if lanes or time changed.
        self._computed_for = (-1, -1)  # revision of the lanes, run time
        self._live: tuple[KnownLane, ...] = ()
        self._at_admission: WeightsId | None = None

    def on_time(self, now_ms: int) -> None:
        """Advance run time; lanes that were silent for too long stop to count."""
        self._now_ms = max(self._now_ms, now_ms)
        self._lanes.pass_time(self._now_ms)

    def on_report(self, report: ReportedEngine) -> None:
        """Apply a heartbeat."""
        self._lanes.observe(report, at_ms=self._now_ms)

    def on_loaded(self, loaded: LoadedWeights) -> None:
        """Apply that a lane serves newer weights."""
        self._lanes.observe_loaded(loaded, at_ms=self._now_ms)

    @property
    def served(self) -> WeightsId | None:
        """Newest weights that all live lanes served at one moment; None: no lane ever served."""
        return self._lanes.floor

    @property
    def revision(self) -> int:
        """Rises if a report says more than that a live lane is still there."""
        return self._lanes.revision

    @property
    def is_any_live(self) -> bool:
        """Whether some engine could generate at this moment."""
        self._compute()
        return bool(self._live)

    def at_admission(self) -> WeightsId | None:
        """Lineage and version that no token of a group admitted at this moment is behind.

        None if no lane ever served. A restarted trainer begins a new lineage at the version of
        its checkpoint, which may be older than `served`; a live lane that is there already makes
        tokens of that version, so it counts.
        """
        self._compute()
        return self._at_admission

    def version(self) -> int | None:
        """The version of `at_admission`."""
        weights = self.at_admission()
        return None if weights is None else weights[1]

    def known(self) -> tuple[KnownLane, ...]:
        """All lanes ever heard of, by number."""
        return self._lanes.known()

    def restore(
        self, lanes: tuple[KnownLane, ...], *, served: WeightsId | None, now_ms: int
    ) -> None:
        """Replace all state."""
        self._lanes.restore(lanes, floor=served)
        self._now_ms = now_ms

    def _compute(self) -> None:
        key = (self._lanes.revision, self._now_ms)
        if key == self._computed_for:
            return
        self._computed_for, self._live = key, self._lanes.live(self._now_ms)
        self._at_admission = self.served
        if self.served is not None:
            lineage, version = self.served
            newer = (lane.weights[1] for lane in self._live if lane.weights[0] > lineage)
            self._at_admission = lineage, min([version, *newer])
