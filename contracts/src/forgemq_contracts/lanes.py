"""Which lanes are live and which weights they serve: one rule for every reader of heartbeats.

Scheduler (frees slots), gateway (gives out requests), trainer (offers new weights) and console
decide with this class. It is pure: the caller says what time it is, by any clock that never goes
back, and always by the same one.

Readers get heartbeats late and in different orders, so two of them may disagree about a lane at
any moment. The staleness bound does not depend on their agreement: docs/staleness.md.
"""

from typing import TypeAlias

from msgspec import Struct, structs

from forgemq_contracts.weights import LoadedWeights, ReportedEngine

LANE_LAPSE_MS = 5000
"""A lane without a heartbeat for longer counts as dead until it is heard again.

Five heartbeats: one garbage collection or one change of a broker's leader kills no lane, and an
agent whose engine died waits a few seconds only.
"""

WeightsId: TypeAlias = tuple[int, int]
"""Lineage and version; a newer lineage is newer, whatever its version is."""


class KnownLane(Struct, frozen=True, kw_only=True):
    """What an observer knows of one lane, under the newest epoch it has heard of."""

    lane: int
    epoch: int
    is_serving: bool
    weights: WeightsId
    heard_ms: int


class LaneLiveness:
    """The lanes of a run as one observer knows them.

    A lane is live while it says that it serves and its last heartbeat is at most LANE_LAPSE_MS
    old. `floor` is the newest weights that all live lanes served at one moment. It never goes
    back, so a lane that comes late, or back after a silence, takes no requests until it has
    caught up.

    Example: lanes 0 and 1 report weights (1, 3) and (1, 4), so the floor is (1, 3). Lane 0 falls
    silent: 5 s later the floor is (1, 4). Lane 0 comes back with (1, 3): it is live, and behind.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, KnownLane] = {}
        self.floor: WeightsId | None = None
        self._passed_ms = 0
        self.revision = 0
        """Rises with the floor, and if a report says more than that a live lane is still there."""

    def observe(self, report: ReportedEngine, *, at_ms: int) -> bool:
        """Apply a heartbeat; False if it is ignored because the lane has a newer epoch."""
        known = self._lanes.get(report.lane)
        if known is not None and report.epoch < known.epoch:
            # The process of an older epoch that has not yet noticed its successor.
            return False
        weights = (report.lineage, report.version)
        if known is not None and report.epoch == known.epoch:
            # Heartbeats and LoadedWeights are on two topics without a common order. A lane never
            # serves older weights than before under one epoch, so the newest it named hold.
            weights = max(weights, known.weights)
        heard = KnownLane(
            lane=report.lane,
            epoch=report.epoch,
            is_serving=report.is_serving,
            weights=weights,
            heard_ms=at_ms,
        )
        is_news = known is None or not _says_the_same(known, heard)
        self._keep(heard, is_news=is_news)
        if is_news or at_ms != self._passed_ms:
            self.pass_time(at_ms)
        return True

    def observe_loaded(self, loaded: LoadedWeights, *, at_ms: int) -> None:
        """Apply that a lane serves these weights; only a heartbeat makes a lane live."""
        known = self._lanes.get(loaded.lane)
        if known is not None and loaded.epoch < known.epoch:
            return
        if known is None or loaded.epoch > known.epoch:  # A process that was not heard yet.
            known = KnownLane(
                lane=loaded.lane,
                epoch=loaded.epoch,
                is_serving=False,
                weights=(loaded.lineage, loaded.version),
                heard_ms=at_ms,
            )
        weights = max(known.weights, (loaded.lineage, loaded.version))
        served = structs.replace(known, weights=weights)
        self._keep(served, is_news=True)
        self.pass_time(at_ms)

    def pass_time(self, at_ms: int) -> None:
        """Raise the floor to what all lanes serve that are live at this moment."""
        self._passed_ms = at_ms
        oldest = min((lane.weights for lane in self.live(at_ms)), default=None)
        if oldest is not None:
            self.raise_floor(oldest)

    def raise_floor(self, weights: WeightsId) -> None:
        """Give lanes behind these weights no requests from here on."""
        if self.floor is None or weights > self.floor:
            self.floor = weights
            self.revision += 1

    def live(self, at_ms: int) -> tuple[KnownLane, ...]:
        """Lanes that serve and were heard of in time, by number."""
        return tuple(
            lane
            for _, lane in sorted(self._lanes.items())
            if lane.is_serving and at_ms - lane.heard_ms <= LANE_LAPSE_MS
        )

    def takes_requests(self, at_ms: int) -> tuple[KnownLane, ...]:
        """Live lanes that are not behind the floor, by number."""
        floor = self.floor
        return tuple(lane for lane in self.live(at_ms) if floor is None or lane.weights >= floor)

    def holds(self, lane: int, epoch: int, *, at_ms: int) -> bool:
        """Whether work given to the lane under this epoch can still come back.

        A lane that is leaving says that it does not serve, and still finishes what it has.
        """
        known = self._lanes.get(lane)
        return (
            known is not None and known.epoch == epoch and at_ms - known.heard_ms <= LANE_LAPSE_MS
        )

    def known(self) -> tuple[KnownLane, ...]:
        """All lanes ever heard of, by number."""
        return tuple(self._lanes[lane] for lane in sorted(self._lanes))

    def restore(self, lanes: tuple[KnownLane, ...], *, floor: WeightsId | None) -> None:
        """Replace all state with what `known` and `floor` were."""
        self._lanes = {lane.lane: lane for lane in lanes}
        self.floor = floor
        self.revision += 1

    def _keep(self, lane: KnownLane, *, is_news: bool) -> None:
        self._lanes[lane.lane] = lane
        self.revision += is_news


def _says_the_same(before: KnownLane, heard: KnownLane) -> bool:
    """Whether a lane only says that it is still there, and was not thought dead."""
    is_same = (before.epoch, before.is_serving, before.weights) == (
        heard.epoch,
        heard.is_serving,
        heard.weights,
    )
    return is_same and heard.heard_ms - before.heard_ms <= LANE_LAPSE_MS
