"""Which engines count as alive."""

from forgemq_contracts.weights import ReportedEngine
from forgemq_trainer.core.lanes import LiveLanes


def _report(lane: int, epoch: int, *, is_serving: bool = True) -> ReportedEngine:
    return ReportedEngine(
        lane=lane,
        epoch=epoch,
        url="http://127.0.0.1:1",
        is_serving=is_serving,
        lineage=1,
        version=0,
        running=0,
        queued=0,
        reported_ms=0,
    )


def test_a_lane_is_live_until_its_last_report_is_too_old() -> None:
    lanes = LiveLanes()
    lanes.observe(_report(0, 3), at_s=10)
    lanes.observe(_report(1, 1), at_s=12)
    assert lanes.live(at_s=15) == {0: 3, 1: 1}
    assert lanes.live(at_s=15.1) == {1: 1}


def test_a_newer_epoch_replaces_and_an_older_one_is_ignored() -> None:
    lanes = LiveLanes()
    lanes.observe(_report(0, 4), at_s=10)
    lanes.observe(_report(0, 3, is_serving=False), at_s=11)
    assert lanes.live(at_s=11) == {0: 4}
    lanes.observe(_report(0, 5), at_s=12)
    assert lanes.live(at_s=12) == {0: 5}


def test_a_lane_that_does_not_serve_is_not_live() -> None:
    lanes = LiveLanes()
    lanes.observe(_report(0, 4), at_s=10)
    lanes.observe(_report(0, 4, is_serving=False), at_s=11)
    assert lanes.live(at_s=11) == {}
