"""Reads which lanes a run is to have, for those who start and stop their processes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

import msgspec

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Log, Place, Record
from forgemq_contracts.lane_plan import LanePlan, PlannedLane, RequestedLane, lanes_limit
from forgemq_contracts.run import LogLayout
from forgemq_contracts.topics import REQUESTED_LANES

_PLACE = Place(REQUESTED_LANES.name, 0)
_READ_TIMEOUT_S = 0.5
"""Longest wait of one read; a record that comes ends it."""
_RECORDS_MAX = 500
"""Changes are made by people: more than a run ever has."""


ApplyLanes: TypeAlias = Callable[[Mapping[int, PlannedLane]], Awaitable[None]]
"""Starts and stops processes so that they are those of the plan."""


async def follow_lanes(log: Log, layout: LogLayout, *, apply: ApplyLanes) -> None:
    """Apply the plan of lanes as it is, then each change of it, until cancelled.

    A lane that is removed and added at once is another one: each change is applied by itself.
    """
    plan = LanePlan(lanes=layout.lanes, lanes_max=lanes_limit(layout))
    end = (await log.end_positions([_PLACE]))[_PLACE]
    reader = await log.reader(await log.first_positions([_PLACE]))
    try:
        async for records in read_up_to(reader, {_PLACE: end}):
            for record in records:
                _changes(plan, record)
        await apply(plan.lanes)
        while True:
            for record in await reader.read(timeout_s=_READ_TIMEOUT_S, records_max=_RECORDS_MAX):
                if _changes(plan, record):
                    await apply(plan.lanes)
    finally:
        await reader.close()


def _changes(plan: LanePlan, record: Record) -> bool:
    """Apply a record; whether it changed the plan. Every reader leaves out what does not decode."""
    try:
        change = decoded_record(record)
    except msgspec.ValidationError:
        return False
    assert isinstance(change, RequestedLane), type(change)
    return not plan.apply(change)
