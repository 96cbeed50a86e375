"""What the lane API says about each lane of the plan."""

from collections.abc import Iterable

from forgemq_contracts.engine_address import engine_address
from forgemq_contracts.lane_plan import PlannedLane
from forgemq_contracts.lane_routes import LaneStatus
from forgemq_contracts.weights import EngineLoad
from forgemq_gateway.core.lanes import HeardReport, Lanes


def lane_statuses(
    planned: Iterable[PlannedLane], lanes: Lanes, *, now_s: float
) -> tuple[LaneStatus, ...]:
    """The status of each of these lanes at this monotonic time, in their order."""
    taking = set(lanes.taking(now_s))
    return tuple(
        _unheard(each)
        if (heard := lanes.newest.get(each.lane)) is None
        else _heard(each, heard, takes_requests=each.lane in taking, now_s=now_s)
        for each in planned
    )


def _unheard(planned: PlannedLane) -> LaneStatus:
    return LaneStatus(
        lane=planned.lane,
        state=planned.state,
        takes_requests=False,
        silent_s=None,
        engine_url=planned.engine_url,
        epoch=0,
        lineage=0,
        version=0,
        running=0,
        queued=0,
        prefill_tokens_per_s=0.0,
        used_tokens=0,
        capacity_tokens=0,
    )


def _heard(
    planned: PlannedLane, heard: HeardReport, *, takes_requests: bool, now_s: float
) -> LaneStatus:
    report = heard.report
    load = report.load or EngineLoad()
    # The newest heartbeat may be that of a lane of this number that was removed.
    held, wanted = engine_address(report.url), engine_address(planned.engine_url)
    is_of_another_engine = wanted not in (None, held)
    return LaneStatus(
        lane=planned.lane,
        state=planned.state,
        takes_requests=takes_requests,
        silent_s=round(max(0.0, now_s - heard.heard_s), 3),
        engine_url=planned.engine_url or report.url,
        epoch=report.epoch,
        lineage=report.lineage,
        version=report.version,
        running=report.running,
        queued=report.queued,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        used_tokens=load.used_tokens,
        capacity_tokens=load.capacity_tokens,
        detail="" if is_of_another_engine else report.detail,
    )
