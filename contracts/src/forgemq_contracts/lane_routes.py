"""The lane API over HTTP: which lanes a run has, and how people add, drain and remove them."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.admin_routes import RefusalStatus, Route
from forgemq_contracts.fields import Epoch, Lane, Lineage, Version
from forgemq_contracts.lane_plan import EngineUrl, LaneState


class LaneAddition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of POST /v1/lanes: another engine for the run."""

    engine_url: EngineUrl = ""
    lane: Annotated[Lane | None, Meta(description="null: the lowest number that is free.")] = None


class LaneStatus(Struct, frozen=True, kw_only=True):
    """What is wanted of one lane, and what its newest heartbeat says."""

    lane: Lane
    state: LaneState
    takes_requests: Annotated[
        bool,
        Meta(
            description="Whether this gateway gives it requests: it is to serve and does, is not "
            "behind the weights that the run is at, and its engine does not fail."
        ),
    ]
    silent_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Since its newest heartbeat; null: none was heard."),
    ]
    engine_url: Annotated[
        str, Meta(description="As it was added; if it was not, from its newest heartbeat.")
    ]
    epoch: Epoch
    lineage: Lineage
    version: Version
    running: Annotated[int, Meta(ge=0, description="Requests in its engine, of all gateways.")]
    queued: Annotated[int, Meta(ge=0, description="Requests that wait for its engine.")]
    prefill_tokens_per_s: Annotated[
        float, Meta(ge=0, description="Context tokens that its engine reads; 0: not measured.")
    ]
    used_tokens: Annotated[int, Meta(ge=0, description="Of its K/V cache, by running requests.")]
    capacity_tokens: Annotated[int, Meta(ge=0, description="Of its K/V cache; 0: not known.")]
    detail: Annotated[
        str,
        Meta(
            description="Why it cannot serve, by its newest heartbeat: its engine does not answer, "
            "or is refused. '': it can, or has not said anything."
        ),
    ] = ""


class LaneList(Struct, frozen=True, kw_only=True):
    """Every lane that the run is to have, by number."""

    lanes: tuple[LaneStatus, ...]
    lanes_max: Annotated[int, Meta(ge=1, description="How many it can have at once.")]


_REFUSALS: tuple[tuple[RefusalStatus, str], ...] = (
    (404, "The run has no such lane."),
    (409, "The lane is in that state already, or the run would stand still."),
)
LIST_LANES = Route(
    name="list_lanes",
    method="GET",
    path="/v1/lanes",
    summary="List the lanes of the run: what is wanted of each, and how it is doing.",
    answer=LaneList,
)
ADD_LANE = Route(
    name="add_lane",
    method="POST",
    path="/v1/lanes",
    summary="Let the run have another lane; it takes requests once its engine serves.",
    body=LaneAddition,
    answer=LaneStatus,
    refusals=((409, "The run has this lane, or no room for another one."),),
)
DRAIN_LANE = Route(
    name="drain_lane",
    method="POST",
    path="/v1/lanes/{lane}/drain",
    summary="Give the lane no further request; it finishes those that it has.",
    answer=LaneStatus,
    refusals=_REFUSALS,
)
RESUME_LANE = Route(
    name="resume_lane",
    method="POST",
    path="/v1/lanes/{lane}/resume",
    summary="Give a drained lane requests again.",
    answer=LaneStatus,
    refusals=_REFUSALS,
)
REMOVE_LANE = Route(
    name="remove_lane",
    method="POST",
    path="/v1/lanes/{lane}/remove",
    summary="End the lane's processes; requests that do not end in time go to other lanes.",
    answer=LaneList,
    refusals=_REFUSALS,
)

ALL = (LIST_LANES, ADD_LANE, DRAIN_LANE, RESUME_LANE, REMOVE_LANE)
