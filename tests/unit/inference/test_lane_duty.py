"""What one inference process makes of the plan of lanes."""

from collections.abc import Sequence
from io import StringIO

import pytest
from msgspec.structs import replace

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.lane_plan import LaneChange, RequestedLane
from forgemq_contracts.messages import Output
from forgemq_contracts.run import LogLayout
from forgemq_inference.lane_duty import PLACE, LaneDuty
from forgemq_shell.records import emit_of
from forgemq_telemetry import Telemetry

LAYOUT = LogLayout(lanes=2, lanes_max=3)


def duty_of(lane: int, events: StringIO | None = None) -> LaneDuty:
    return LaneDuty(lane, LAYOUT, telemetry=Telemetry(service="inference", stream=events))


def change(kind: LaneChange, lane: int) -> RequestedLane:
    return RequestedLane(lane=lane, change=kind, change_id="0" * 32, requested_ms=0)


def test_a_lane_is_told_of_its_own_changes_alone():
    duty, told = duty_of(0), []
    duty.on_change = lambda: told.append(duty.is_wanted)
    for asked in (
        change("drain", 1),
        change("drain", 0),  # Refused: lane 0 is the last one.
        change("resume", 1),
        change("drain", 0),
        change("resume", 0),
    ):
        duty.take(asked)
    assert told == [False, True]
    assert not duty.removed.is_set()
    duty.take(change("remove", 0))
    assert (duty.is_wanted, duty.removed.is_set()) == (False, True)


@pytest.mark.parametrize(
    ("lane", "changes", "is_wanted"),
    [
        (0, [], True),
        (2, [], False),
        (2, [change("add", 2)], True),
        (1, [change("drain", 1)], False),
        (1, [change("drain", 1), change("resume", 1)], True),
        (1, [change("remove", 1)], False),
        (1, [change("remove", 1), change("add", 1)], True),
    ],
)
async def test_a_process_that_starts_knows_the_plan_and_is_not_removed_by_it(
    lane: int, changes: Sequence[RequestedLane], is_wanted: bool
):
    log = MemoryLog(run="r")
    await log.create_topics({topics.REQUESTED_LANES.name: 1})
    writer = await log.writer()
    for asked in changes:
        output = Output(topic=topics.REQUESTED_LANES.name, partition=0, record=asked)
        await writer.write(emit_of(output))
    events = StringIO()
    duty = duty_of(lane, events)
    assert await duty.restore(log) == len(changes)
    assert (duty.is_wanted, duty.removed.is_set()) == (is_wanted, False)
    assert ("lane_waits" in events.getvalue()) is not is_wanted
    await log.close()


async def test_a_record_that_does_not_decode_is_left_out():
    log = MemoryLog(run="r")
    await log.create_topics({topics.REQUESTED_LANES.name: 1})
    writer = await log.writer()
    good = emit_of(Output(topic=PLACE.topic, partition=0, record=change("drain", 1)))
    await writer.write(replace(good, value=b"\xc1"))
    await writer.write(good)
    duty = duty_of(1)
    assert await duty.restore(log) == 2
    assert not duty.is_wanted
    await log.close()
