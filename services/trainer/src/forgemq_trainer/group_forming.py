"""Keeps the process group of all lanes formed, between two versions."""

import asyncio

from forgemq_contracts.lanes import WeightsId
from forgemq_contracts.messages import Output
from forgemq_contracts.topics import OFFERED_BROADCASTS
from forgemq_shell.records import emit_of
from forgemq_telemetry import Telemetry
from forgemq_trainer.core.lanes import LiveLanes
from forgemq_trainer.core.shared_members import GroupMember, SharedMembers
from forgemq_trainer.previous_lives import TrainerLife
from forgemq_trainer.shared_path import SharedPath


class GroupForming:
    """Offers a group when its members are to be others, and forms it; one at a time.

    `look` often, but not during a transfer; `finish` before one.
    """

    def __init__(
        self,
        shared: SharedPath,
        lanes: LiveLanes,
        *,
        life: TrainerLife,
        prefix: str,
        tasks: asyncio.TaskGroup,
        telemetry: Telemetry,
    ) -> None:
        """Offer nothing yet; `tasks` runs the forming."""
        self._shared = shared
        self._lanes = lanes
        self._life = life
        self._prefix = prefix
        self._tasks = tasks
        self._telemetry = telemetry
        self._members = SharedMembers()
        self._forming: asyncio.Task[None] | None = None

    def look(self, newest: WeightsId, *, at_s: float) -> None:
        """Begin to form a group if another one is wanted among the lanes that are at `newest`."""
        if self._forming is not None and not self._forming.done():
            return
        ready = self._lanes.at(newest, at_s=at_s)
        late = self._lanes.live(at_s=at_s).keys() - {member.lane for member in ready}
        wanted = self._members.wanted(ready, late=late, formed=self._intact(), at_s=at_s)
        if wanted:
            self._forming = self._tasks.create_task(self._form(wanted))

    def in_group(self, weights: WeightsId, *, at_s: float) -> tuple[GroupMember, ...]:
        """The live lanes that serve these weights and whose engines are in the present group.

        An engine leaves it by itself after an error, or for one that other lanes did not join.
        """
        ready = self._lanes.at(weights, at_s=at_s)
        name = self._shared.group_name
        return tuple(each for each in ready if self._lanes.is_in_group(each.lane, name))

    async def finish(self) -> None:
        """Wait until no group is being formed; the deadlines of forming bound the wait."""
        while (forming := self._forming) is not None:
            await forming
            # When one ends, `look` may have begun the next before this goes on.
            if self._forming is forming:
                self._forming = None

    def _intact(self) -> tuple[GroupMember, ...]:
        """The members of the present group; none if the engine of one is not in it any more."""
        name, members = self._shared.group_name, self._shared.members
        is_intact = all(self._lanes.is_in_group(member.lane, name) for member in members)
        return members if is_intact else ()

    async def _form(self, members: tuple[GroupMember, ...]) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        offered = self._shared.offer_group(members, prefix=self._prefix, lineage=self._life.lineage)
        output = Output(topic=OFFERED_BROADCASTS.name, partition=0, record=offered)
        await self._life.writer.write(emit_of(output))
        absent = await asyncio.to_thread(self._shared.form, has_joined=self._lanes.is_in_group)
        if absent:
            self._members.note_absent(absent, at_s=loop.time())
            self._telemetry.count("trainer.group_failures")
        else:
            self._members.note_formed(members)
        self._telemetry.event(
            "group_formed" if not absent else "group_not_formed",
            group=offered.group_name,
            lanes=[member.lane for member in members],
            absent=[member.lane for member in absent],
            took_s=round(loop.time() - started_s, 3),
        )
