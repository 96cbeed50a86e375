"""Which lanes a run is to have: a record for each change, and one rule for every reader.

A run begins with the lanes that its configuration says. Engines are added, drained and removed
while it is up by records on one partition. Every reader applies them in the order of the log, and
all refuse the same ones: of two changes that exclude each other the first on the log holds.

The plan says what is wanted; heartbeats alone say what is there (`lanes.py`). A lane that is
not to serve reports so; then it holds back no floor, gets no offer of weights, and bounds nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.fields import Lane, TimeMs
from forgemq_contracts.run import LogLayout

LaneState: TypeAlias = Annotated[
    Literal["serving", "drained"],
    Meta(
        description="serving: takes requests if its engine serves. drained: takes no request, "
        "finishes those that it has, and keeps its weights up to date."
    ),
]
LaneChange: TypeAlias = Annotated[
    Literal["add", "drain", "resume", "remove"],
    Meta(
        description="add: a lane that the run does not have is to serve. drain: it is to take no "
        "request. resume: a drained lane is to serve again. remove: its processes are to end."
    ),
]
EngineUrl: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(https?://[^\s/]+(/[^\s]*)?)?$",
        description="Address of the engine; '': the settings of the lane's process name it.",
    ),
]


class RequestedLane(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Somebody asked for a change of one lane; `LanePlan` says whether it holds."""

    lane: Lane
    change: LaneChange
    change_id: Annotated[
        str,
        Meta(pattern=r"^[0-9a-f]{32}$", description="By which the asker finds its own record."),
    ]
    requested_ms: TimeMs
    engine_url: Annotated[EngineUrl, Meta(description="Of an added lane.")] = ""


class PlannedLane(Struct, frozen=True, kw_only=True):
    """What is wanted of one lane."""

    lane: int
    state: LaneState
    engine_url: str = ""


def lanes_limit(layout: LogLayout) -> int:
    """Engines that a run can have at once: partitions of its lane topics."""
    return layout.lanes if layout.lanes_max is None else layout.lanes_max


class LanePlan:
    """The lanes that a run is to have.

    Invariant: at least one lane is to serve.

    Example: a run with `log.lanes` 2 and `log.lanes_max` 3 has lanes 0 and 1. "add 2" holds, and
    "add 2" again does not. After "drain 0" and "remove 1" lane 2 alone serves: "drain 2" is
    refused, since the run would stand still.

    Args:
        lanes: With which the run began: 0 to this, exclusive.
        lanes_max: Of the run at once; partitions of the lane topics.
    """

    def __init__(self, *, lanes: int, lanes_max: int) -> None:
        self._lanes_max = lanes_max
        self._lanes = {lane: PlannedLane(lane=lane, state="serving") for lane in range(lanes)}

    @property
    def lanes(self) -> Mapping[int, PlannedLane]:
        """Every lane that the run is to have, by number."""
        return dict(sorted(self._lanes.items()))

    def serves(self, lane: int) -> bool:
        """Whether this lane is to take requests."""
        planned = self._lanes.get(lane)
        return planned is not None and planned.state == "serving"

    def free_lane(self) -> int | None:
        """The lowest number that no lane has; None if there is no room for another lane."""
        return next((n for n in range(self._lanes_max) if n not in self._lanes), None)

    def refusal(self, asked: RequestedLane) -> str:
        """Why a change cannot hold, with the rule; '' if it can."""
        lane, known = asked.lane, self._lanes.get(asked.lane)
        if asked.change == "add":
            return self._refused_addition(lane)
        if known is None:
            present = ", ".join(map(str, self.lanes))
            return f"the run has no lane {lane}; it has {present}"
        if asked.change == "resume":
            return "" if known.state == "drained" else f"lane {lane} is not drained"
        if asked.change == "drain" and known.state == "drained":
            return f"lane {lane} is drained already"
        if not any(self.serves(other) for other in self._lanes if other != lane):
            return (
                f"lane {lane} is the last one that is to serve, and without it the run "
                "stands still; add or resume one before"
            )
        return ""

    def apply(self, asked: RequestedLane) -> str:
        """Apply a change in the order of the log; returns why it does not hold, '' if it does."""
        if refusal := self.refusal(asked):
            return refusal
        lane = asked.lane
        match asked.change:
            case "add":
                self._lanes[lane] = PlannedLane(
                    lane=lane, state="serving", engine_url=asked.engine_url
                )
            case "remove":
                del self._lanes[lane]
            case "drain" | "resume":
                self._lanes[lane] = PlannedLane(
                    lane=lane,
                    state="drained" if asked.change == "drain" else "serving",
                    engine_url=self._lanes[lane].engine_url,
                )
        self._check()
        return ""

    def _refused_addition(self, lane: int) -> str:
        if lane in self._lanes:
            return f"the run has a lane {lane}; resume it if it is drained"
        if lane >= self._lanes_max:
            return (
                f"the run has room for lanes 0 to {self._lanes_max - 1} "
                f"(log.lanes_max={self._lanes_max}), got {lane}"
            )
        return ""

    def _check(self) -> None:
        assert any(self.serves(lane) for lane in self._lanes), "a lane is to serve"
        assert all(0 <= lane < self._lanes_max for lane in self._lanes)
