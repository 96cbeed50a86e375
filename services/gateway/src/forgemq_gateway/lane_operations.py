"""What the routes of the lane API do: each change is a record, and the plan on the log decides."""

import asyncio
import secrets

from forgemq_contracts.engine_address import engine_address
from forgemq_contracts.lane_plan import LaneChange, RequestedLane
from forgemq_contracts.lane_routes import LaneAddition, LaneList, LaneStatus
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.errors import RefusedError, busy, conflict, invalid, unknown
from forgemq_gateway.core.lane_status import lane_statuses
from forgemq_gateway.core.lanes import Lanes

_APPLIED_S = 5.0
"""The feed passes a record within a second, unless the log is away."""


class LaneOperations:
    """One method for each route; every gateway of a run can answer each of them."""

    def __init__(self, lanes: Lanes, *, context: GatewayContext) -> None:
        self._lanes = lanes
        self._changes = context.lane_changes
        self._outbox = context.outbox
        self._clock = context.clock

    def all_lanes(self) -> LaneList:
        """Every lane of the plan, as it is now."""
        planned = self._changes.plan.lanes.values()
        return LaneList(
            lanes=lane_statuses(planned, self._lanes, now_s=self._clock.now_s()),
            lanes_max=self._changes.lanes_max,
        )

    async def add(self, asked: LaneAddition) -> LaneStatus:
        """Plan another lane; returns its status.

        Raises:
            RefusedError: 400, the address names no server; 409, the lane exists, there is no room,
                or its engine serves another lane; 503, the log is away.
        """
        if asked.engine_url:
            self._check_engine(asked.engine_url)
        lane = self._changes.plan.free_lane() if asked.lane is None else asked.lane
        if lane is None:
            raise conflict(
                f"the run has {self._changes.lanes_max} lanes, as many as log.lanes_max allows: "
                "remove one first"
            )
        await self._change(lane, "add", engine_url=asked.engine_url)
        return self._status(lane)

    async def drain(self, lane: str) -> LaneStatus:
        """Give a lane no further request; returns its status.

        Raises:
            RefusedError: 404, no such lane; 409, it is drained, or no other takes requests.
        """
        number = self._number(lane)
        self._check_others(number)
        await self._change(number, "drain")
        return self._status(number)

    async def resume(self, lane: str) -> LaneStatus:
        """Let a drained lane serve again; returns its status.

        Raises:
            RefusedError: 404, no such lane; 409, it is not drained.
        """
        number = self._number(lane)
        await self._change(number, "resume")
        return self._status(number)

    async def remove(self, lane: str) -> LaneList:
        """Let a lane's processes end; returns the lanes that are left.

        Raises:
            RefusedError: 404, no such lane; 409, no other takes requests.
        """
        number = self._number(lane)
        self._check_others(number)
        await self._change(number, "remove")
        return self.all_lanes()

    def _number(self, lane: str) -> int:
        known = self._changes.plan.lanes
        # Compared as text: a path may have any characters, digits of other scripts among them.
        if lane not in map(str, known):
            present = ", ".join(map(str, known))
            raise _about_lane(unknown(f"the run has no lane {lane!r}; it has {present}"))
        return int(lane)

    def _status(self, lane: int) -> LaneStatus:
        planned = self._changes.plan.lanes.get(lane)
        if planned is None:
            raise _about_lane(conflict(f"lane {lane} was removed meanwhile"))
        (status,) = lane_statuses([planned], self._lanes, now_s=self._clock.now_s())
        return status

    def _check_engine(self, engine_url: str) -> None:
        """Refuse a second lane for an engine: each would end the other's requests and weights."""
        asked = engine_address(engine_url)
        if asked is None:
            raise invalid(
                f"engine_url must be an address such as http://10.0.0.7:30000, got {engine_url!r}",
                param="engine_url",
            )
        for each in self.all_lanes().lanes:
            if engine_address(each.engine_url) == asked:
                raise conflict(
                    f"lane {each.lane} has the engine at {each.engine_url}, and an engine serves "
                    "one lane: name another one, or remove that lane first",
                    param="engine_url",
                )

    def _check_others(self, lane: int) -> None:
        """Refuse to take away the only lane that takes requests now, whatever the plan says."""
        if self._lanes.taking(self._clock.now_s()) == (lane,):
            raise _about_lane(
                conflict(
                    f"lane {lane} is the only one that takes requests at the moment, and without "
                    "it the run stands still: wait until another one serves"
                )
            )

    async def _change(self, lane: int, change: LaneChange, *, engine_url: str = "") -> None:
        """Write a change, and wait until it is applied here.

        Raises:
            RefusedError: 409, the plan refuses it; 503, the log is away, and it may hold later.
        """
        record = RequestedLane(
            lane=lane,
            change=change,
            change_id=secrets.token_hex(16),
            requested_ms=self._clock.wall_ms(),
            engine_url=engine_url,
        )
        refusal = self._changes.plan.refusal(record)
        if not refusal:
            # Another gateway may have written one before: the order on the log decides.
            refusal = await self._applied(record)
        if refusal:
            raise _about_lane(conflict(refusal))

    async def _applied(self, record: RequestedLane) -> str:
        verdict = self._changes.expect(record.change_id)
        try:
            async with asyncio.timeout(_APPLIED_S):
                await self._outbox.write(record)
                return await verdict
        except TimeoutError:
            raise busy(
                f"the log takes too long: whether lane {record.lane} is changed is seen with "
                "GET /v1/lanes",
                status=503,
            ) from None
        finally:
            verdict.cancel()


def _about_lane(error: RefusedError) -> RefusedError:
    error.param = "lane"
    return error
