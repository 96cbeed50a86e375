"""The plan of lanes: what each change does, what is refused, and what always holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.lane_plan import LanePlan, RequestedLane, lanes_limit
from forgemq_contracts.run import LogLayout

CHANGES = ("add", "drain", "resume", "remove")


def change(kind: str, lane: int, *, engine_url: str = "") -> RequestedLane:
    return RequestedLane(
        lane=lane, change=kind, change_id="0" * 32, requested_ms=0, engine_url=engine_url
    )


def states(plan: LanePlan) -> dict[int, str]:
    return {number: lane.state for number, lane in plan.lanes.items()}


def test_a_run_begins_with_the_lanes_of_its_configuration():
    assert states(LanePlan(lanes=2, lanes_max=4)) == {0: "serving", 1: "serving"}
    assert lanes_limit(LogLayout(lanes=3)) == 3
    assert lanes_limit(LogLayout(lanes=3, lanes_max=5)) == 5


def test_a_lane_is_added_drained_resumed_and_removed():
    plan = LanePlan(lanes=1, lanes_max=3)
    assert plan.free_lane() == 1
    assert plan.apply(change("add", 1, engine_url="http://engine:1")) == ""
    assert plan.lanes[1].engine_url == "http://engine:1"
    assert plan.apply(change("drain", 1)) == ""
    assert (states(plan), plan.serves(1)) == ({0: "serving", 1: "drained"}, False)
    assert plan.lanes[1].engine_url == "http://engine:1"
    assert plan.apply(change("resume", 1)) == ""
    assert plan.serves(1)
    assert plan.apply(change("remove", 0)) == ""
    assert states(plan) == {1: "serving"}
    assert plan.free_lane() == 0


@pytest.mark.parametrize(
    ("kind", "lane", "words"),
    [
        ("add", 0, "the run has a lane 0"),
        ("add", 3, r"room for lanes 0 to 2 \(log.lanes_max=3\), got 3"),
        ("drain", 7, "no lane 7; it has 0, 1"),
        ("drain", 1, "lane 1 is drained already"),
        ("resume", 0, "lane 0 is not drained"),
        ("drain", 0, "lane 0 is the last one that is to serve"),
        ("remove", 0, "lane 0 is the last one that is to serve"),
        ("remove", 2, "no lane 2; it has 0, 1"),
    ],
)
def test_a_change_that_cannot_hold_is_refused_by_its_rule(kind: str, lane: int, words: str):
    plan = LanePlan(lanes=2, lanes_max=3)
    assert plan.apply(change("drain", 1)) == ""
    before = plan.lanes
    with pytest.raises(AssertionError, match=words):
        assert plan.apply(change(kind, lane)) == ""
    assert plan.lanes == before


def test_a_plan_that_is_full_has_no_free_lane():
    assert LanePlan(lanes=2, lanes_max=2).free_lane() is None


@given(
    st.integers(1, 3),
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 6)), max_size=40),
)
def test_any_order_of_changes_leaves_a_lane_that_serves(
    lanes: int, room: int, asked: list[tuple[str, int]]
):
    """Two readers agree, a refused change changes nothing, and `refusal` foretells `apply`."""
    plan, other = (LanePlan(lanes=lanes, lanes_max=lanes + room) for _ in range(2))
    for kind, lane in asked:
        before, foretold = plan.lanes, plan.refusal(change(kind, lane))
        refusal = plan.apply(change(kind, lane))
        assert refusal == foretold
        assert (plan.lanes == before) is bool(refusal)
        other.apply(change(kind, lane))
        assert other.lanes == plan.lanes
        assert "serving" in states(plan).values()
        assert set(plan.lanes) <= set(range(lanes + room))
        free = plan.free_lane()
        assert (free is None) is (len(plan.lanes) == lanes + room)
        assert free not in plan.lanes
