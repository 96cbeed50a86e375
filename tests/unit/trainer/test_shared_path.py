"""One process group for all lanes, of which the thread that sends may let go at any moment."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from io import StringIO
from typing import Any, TypeVar

import torch
from stand_in_lane import heartbeat

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.topics import OFFERED_BROADCASTS
from forgemq_telemetry import Telemetry
from forgemq_trainer.core.lanes import LiveLanes
from forgemq_trainer.core.shared_members import GroupMember
from forgemq_trainer.group_forming import GroupForming
from forgemq_trainer.previous_lives import TrainerLife
from forgemq_trainer.process_group import GroupPlace, WeightGroup
from forgemq_trainer.shared_path import SharedPath, _Shared
from forgemq_trainer.transfer_deadline import TransferDeadline

T = TypeVar("T")

DEADLINE = TransferDeadline(1.0, 1e9)
PLACE = GroupPlace(host="127.0.0.1", backend="gloo", device=torch.device("cpu"), deadline=DEADLINE)


class LaneOfAFailedTransfer(int):
    """A lane that is looked up at the moment at which `send` finds that its transfer failed."""

    path: SharedPath

    def __hash__(self) -> int:
        self.path.drop()
        return int(self)


def test_the_last_lane_may_be_given_up_while_its_transfer_fails() -> None:
    path = SharedPath(host="127.0.0.1", backend="gloo", deadline=DEADLINE)
    group = WeightGroup("g", world_size=2, place=PLACE)
    path._formed, path._is_sending = _Shared(group, (GroupMember(0, 1, 1),)), True
    lane = LaneOfAFailedTransfer(0)
    lane.path = path
    path.give_up(lane)
    assert (group.is_given_up, path.members, path.group_name) == (True, (), "")


class TasksWithAWatcher(asyncio.TaskGroup):
    """Calls `look` as soon as a task ends, before those who wait for the task go on."""

    look: Callable[[], None]

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, name=name, context=context)
        task.add_done_callback(lambda _: self.look())
        return task


async def test_no_group_is_being_formed_once_a_version_has_waited_for_that() -> None:
    """Reports of lanes may begin the next group at the very moment at which one is given up: it
    would be formed beside the version's broadcast, and take the engines from it."""
    path = SharedPath(host="127.0.0.1", backend="gloo", deadline=DEADLINE, form_deadline_s=0.2)
    lanes, log, events = LiveLanes(), MemoryLog(run="r"), StringIO()
    await log.create_topics({OFFERED_BROADCASTS.name: 1})
    lanes.observe(heartbeat(lane=0, version=1), at_s=0.0)
    async with TasksWithAWatcher() as tasks:
        forming = GroupForming(
            path,
            lanes,
            life=TrainerLife(
                lineage=1, claim=await log.transaction_writer("t"), writer=await log.writer()
            ),
            prefix="r-1",
            tasks=tasks,
            telemetry=Telemetry(service="trainer", stream=events),
        )
        tasks.look = lambda: forming.look((1, 1), at_s=0.1)
        tasks.look()
        lanes.observe(heartbeat(lane=1, version=1), at_s=0.1)
        await forming.finish()
        given_up = [json.loads(line)["lanes"] for line in events.getvalue().splitlines()]
    assert given_up == [[0], [1]]
