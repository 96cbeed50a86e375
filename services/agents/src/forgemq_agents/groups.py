"""Plays groups: from asked for, over admitted and claimed, to retired."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping

from forgemq_agents.attendance import Attendance
from forgemq_agents.core.schedule import EvaluationGroup, training_key
from forgemq_agents.errors import EpisodeOverError
from forgemq_agents.gateway import Claim, Gateway, GroupRequest, GroupStatus
from forgemq_agents.user_code import DomainCode

# The gateway answers earlier when the state changes.
STATE_WAIT_S = 20.0
# A lease that lapsed elsewhere is claimed within this time.
CLAIM_WAIT_S = 5.0


class Groups:
    """The groups that one process plays, with a bound on its episodes at once.

    A process holds its groups open and claims what is free in them, so several processes share
    the work and one takes over what another left when it died.
    """

    def __init__(
        self,
        *,
        gateway: Gateway,
        attendance: Attendance,
        domains: Mapping[str, DomainCode],
        seed: int,
        episodes_max: int,
    ) -> None:
        self._gateway = gateway
        self._attendance = attendance
        self._domains = domains
        self._seed = seed
        self._free = asyncio.Semaphore(episodes_max)
        self.training_ended = asyncio.Event()

    async def request_training(self, domain: str, task_number: int) -> GroupStatus:
        """Ask for the group of one training task.

        Raises:
            TrainingEndedError: no more of them are taken.
        """
        return await self._gateway.request_group(
            GroupRequest(
                domain=domain,
                idempotency_key=training_key(domain, task_number),
                task=await self._task(domain, task_number),
                purpose="train",
            )
        )

    async def request_evaluation(self, group: EvaluationGroup) -> GroupStatus:
        """Ask for the group of one held-out task."""
        return await self._gateway.request_group(
            GroupRequest(
                domain=group.domain,
                idempotency_key=group.idempotency_key,
                task=await self._task(group.domain, group.task_number),
                purpose="eval",
                group_size=1,
                temperature=group.temperature,
                round_name=group.round_name,
            )
        )

    async def play(self, status: GroupStatus, *, domain: str, is_training: bool) -> None:
        """Play what is free in the group until it is retired.

        A training group that was never admitted is left when training ends.
        """
        current = await self._admitted(status, is_training=is_training)
        async with asyncio.TaskGroup() as playing:
            episodes: list[asyncio.Task[None]] = []
            while current is not None and current.state != "retired":
                episodes += [
                    self._start(claim, domain=domain, playing=playing)
                    async for claim in self._claims(status.group_id)
                ]
                current = await self._status(current, wait_s=CLAIM_WAIT_S)
            for episode in episodes:
                episode.cancel()

    async def _admitted(self, status: GroupStatus, *, is_training: bool) -> GroupStatus | None:
        """The group once it has a slot; None where it is gone or training ends before."""
        current: GroupStatus | None = status
        while current is not None and current.state == "requested":
            asking = self._status(current, wait_s=STATE_WAIT_S)
            current = await (self._before_end(asking) if is_training else asking)
        return current

    async def _before_end(
        self, asking: Coroutine[None, None, GroupStatus | None]
    ) -> GroupStatus | None:
        """The answer; None where training ends before it comes."""
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(asking)
            end = tasks.create_task(self.training_ended.wait())
            await asyncio.wait((answer, end), return_when=asyncio.FIRST_COMPLETED)
            answer.cancel()
            end.cancel()
        return None if answer.cancelled() else answer.result()

    async def _status(self, known: GroupStatus, *, wait_s: float) -> GroupStatus | None:
        """Where the group stands; None where the gateway knows it no longer."""
        try:
            return await self._gateway.group(known, wait_s=wait_s)
        except EpisodeOverError:
            return None

    async def _claims(self, group_id: str) -> AsyncIterator[Claim]:
        """Free episodes of the group, each with room in this process for it."""
        while True:
            await self._free.acquire()
            claim = None
            try:
                claim = await self._gateway.claim(group_id)
            except EpisodeOverError:
                return
            finally:
                if claim is None:
                    self._free.release()
            if claim is None:
                return
            yield claim

    def _start(
        self, claim: Claim, *, domain: str, playing: asyncio.TaskGroup
    ) -> "asyncio.Task[None]":
        task = playing.create_task(self._attendance.attend(claim, self._domains[domain].play))
        # A callback and no `finally`: a task that is cancelled before it ran has none.
        task.add_done_callback(lambda _: self._free.release())
        return task

    async def _task(self, domain: str, task_number: int) -> object:
        # In a thread: a source may read a data set, and heartbeats must go on meanwhile.
        source = self._domains[domain].task_source
        return await asyncio.to_thread(source, self._seed, domain, task_number)
