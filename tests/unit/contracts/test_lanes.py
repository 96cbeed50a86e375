"""The one rule of which lanes live and which of them take requests."""

from forgemq_contracts.lanes import LANE_LAPSE_MS, LaneLiveness
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_inference.settings import InferenceSettings


def report(
    lane: int = 0, *, version: int = 0, lineage: int = 1, epoch: int = 1, is_serving: bool = True
) -> ReportedEngine:
    return ReportedEngine(
        lane=lane,
        epoch=epoch,
        url="",
        is_serving=is_serving,
        lineage=lineage,
        version=version,
        running=0,
        queued=0,
        reported_ms=0,
    )


def loaded(lane: int = 0, *, version: int, epoch: int = 1) -> LoadedWeights:
    return LoadedWeights(
        lane=lane, epoch=epoch, lineage=1, version=version, path="fast", duration_s=0.0
    )


def lanes_of(*reports: ReportedEngine) -> LaneLiveness:
    lanes = LaneLiveness()
    for record in reports:
        lanes.observe(record, at_ms=0)
    return lanes


def live(lanes: LaneLiveness, *, at_ms: int = 0) -> list[int]:
    return [lane.lane for lane in lanes.live(at_ms)]


def taking(lanes: LaneLiveness, *, at_ms: int = 0) -> list[int]:
    return [lane.lane for lane in lanes.takes_requests(at_ms)]


def test_a_lane_may_miss_heartbeats_before_it_is_given_up():
    heartbeat_s = InferenceSettings(lane=0, engine_url="http://127.0.0.1:1").heartbeat_s
    assert 4000 * heartbeat_s <= LANE_LAPSE_MS


def test_a_lane_is_live_until_its_newest_heartbeat_is_older_than_the_lapse():
    lanes = lanes_of(report(0), report(1, is_serving=False))
    assert live(lanes, at_ms=LANE_LAPSE_MS) == [0]
    assert live(lanes, at_ms=LANE_LAPSE_MS + 1) == []
    lanes.observe(report(0), at_ms=60_000)
    assert live(lanes, at_ms=60_000) == [0]


def test_a_leaving_lane_is_not_live_but_still_holds_its_work():
    lanes = lanes_of(report(0), report(0, is_serving=False))
    assert live(lanes) == []
    assert lanes.holds(0, 1, at_ms=LANE_LAPSE_MS)
    assert not lanes.holds(0, 1, at_ms=LANE_LAPSE_MS + 1)
    assert not lanes.holds(0, 2, at_ms=0)


def test_a_heartbeat_of_an_older_epoch_is_ignored():
    lanes = lanes_of(report(0, epoch=2, version=3))
    assert not lanes.observe(report(0, epoch=1, version=9, is_serving=False), at_ms=1)
    (lane,) = lanes.live(0)
    assert (lane.epoch, lane.weights, lane.heard_ms) == (2, (1, 3), 0)


def test_weights_never_go_back_within_an_epoch_whichever_topic_is_read_first():
    lanes = lanes_of(report(0, version=3))
    lanes.observe_loaded(loaded(0, version=4), at_ms=0)
    lanes.observe(report(0, version=3), at_ms=0)
    assert lanes.live(0)[0].weights == (1, 4)
    lanes.observe(report(0, epoch=2, version=0), at_ms=0)
    assert lanes.live(0)[0].weights == (1, 0)


def test_loaded_weights_alone_make_no_lane_live():
    lanes = LaneLiveness()
    lanes.observe_loaded(loaded(0, version=4), at_ms=0)
    assert live(lanes) == []
    lanes.observe(report(0, version=3), at_ms=0)
    assert lanes.live(0)[0].weights == (1, 4)


def test_loaded_weights_of_a_newer_epoch_end_the_older_one():
    lanes = lanes_of(report(0, epoch=1))
    lanes.observe_loaded(loaded(0, version=4, epoch=2), at_ms=0)
    assert live(lanes) == []
    lanes.observe_loaded(loaded(0, version=9, epoch=1), at_ms=0)
    lanes.observe(report(0, epoch=2, version=4), at_ms=0)
    assert lanes.live(0)[0].weights == (1, 4)


def test_the_floor_is_what_all_live_lanes_served_at_one_moment_and_never_goes_back():
    lanes = lanes_of(report(0, version=3), report(1, version=3))
    lanes.observe(report(1, version=4), at_ms=LANE_LAPSE_MS)
    assert lanes.floor == (1, 3)
    lanes.pass_time(LANE_LAPSE_MS + 1)
    assert lanes.floor == (1, 4)
    lanes.observe(report(0, version=3), at_ms=LANE_LAPSE_MS + 2)
    assert lanes.floor == (1, 4)


def test_a_lane_that_comes_back_behind_the_floor_is_live_and_takes_nothing():
    lanes = lanes_of(report(0, version=4))
    lanes.observe(report(1, version=3), at_ms=1)
    assert live(lanes) == [0, 1]
    assert taking(lanes) == [0]
    lanes.observe_loaded(loaded(1, version=4), at_ms=2)
    assert taking(lanes) == [0, 1]


def test_a_floor_that_somebody_else_decided_on_holds_too():
    lanes = lanes_of(report(0, version=3), report(1, version=4))
    assert taking(lanes) == [0, 1]
    lanes.raise_floor((1, 4))
    assert taking(lanes) == [1]
    lanes.raise_floor((1, 2))
    assert lanes.floor == (1, 4)


def test_a_newer_lineage_is_newer_whatever_its_version_is():
    lanes = lanes_of(report(0, version=4))
    lanes.observe(report(1, lineage=2, version=1), at_ms=0)
    assert taking(lanes) == [0, 1]
    lanes.observe(report(0, lineage=2, version=1), at_ms=0)
    assert lanes.floor == (2, 1)


def test_restored_lanes_are_the_same():
    lanes = lanes_of(report(0, version=3), report(1, version=4, is_serving=False))
    restored = LaneLiveness()
    restored.restore(lanes.known(), floor=lanes.floor)
    assert restored.known() == lanes.known()
    assert (taking(restored), restored.floor) == ([0], (1, 3))
