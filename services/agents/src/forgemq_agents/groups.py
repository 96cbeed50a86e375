"""Plays groups: each is requested, waits for its slot, is claimed and played, and retires."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import suppress
from typing import NamedTuple

from msgspec import Raw

from forgemq_agents.core.schedule import EvaluationGroup, training_key, training_task
from forgemq_agents.episode_player import EpisodePlayer
from forgemq_agents.errors import EpisodeOverError, GatewayError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.room import Reservation, Room
from forgemq_agents.task_size import size_fault
from forgemq_agents.user_code import DomainCode, UserCodeError
from forgemq_agents.user_values import in_json
from forgemq_contracts.admin import Claim, GroupRequest, GroupStatus
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.stages import of_domain

# Length of one long poll for a slot. It may be long: the gateway answers at the change itself.
SLOT_WAIT_S = 20.0
# A freed episode is no change of its group's state, so claims are repeated after this time.
CLAIM_WAIT_S = 5.0
GIVE_BACK_S_MAX = 2.0
"""For the gateway's answers, while the process stops; without them the leases lapse."""


class Chosen(NamedTuple):
    """The task that a curriculum chose, and how many results it knew."""

    task_number: int
    results_known: int


class Groups:
    """The groups that one process plays, with a bound on its episodes at once.

    A process follows its groups until they retire and claims what is free in them. So several
    processes share the work, and each takes over episodes of one that died.
    """

    def __init__(
        self,
        *,
        gateway: GatewayClient,
        player: EpisodePlayer,
        domains: Mapping[str, DomainCode],
        configuration: RunConfiguration,
    ) -> None:
        self._gateway = gateway
        self._player = player
        self._domains = domains
        self._seed = configuration.seed
        self._stages = configuration.stages
        self._evaluation = configuration.evaluation
        self._room = Room(configuration.episodes.concurrent_max)
        # One group of each kind claims at a time, in the order in which they were admitted. If all
        # took turns, all would begin, and with little room none would end before its deadline.
        self._claiming = {is_training: asyncio.Lock() for is_training in (True, False)}
        self._held: set[str] = set()
        self.training_ended = asyncio.Event()

    async def give_back(self) -> None:
        """Give back all episodes that were not played to their end, because the process stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S_MAX), asyncio.TaskGroup() as tasks:
                for episode_id in self._held:
                    tasks.create_task(self._release(episode_id))

    async def _release(self, episode_id: str) -> None:
        with suppress(GatewayError):
            await self._gateway.release(episode_id)

    async def request_training(
        self, domain: str, number: int, *, stage: int | None, chosen: Chosen | None
    ) -> GroupStatus:
        """Ask for a training group, as hard as its stage says.

        Args:
            domain: Of its queue.
            number: That of the group; the task follows from it if nothing chose one.
            stage: None in a run without stages.
            chosen: The task that a curriculum chose.

        Raises:
            TrainingEndedError: no further training group is taken.
        """
        usual = training_task(self._evaluation, number)
        task_number = usual if chosen is None else chosen.task_number
        return await self._gateway.request_group(
            GroupRequest(
                domain=domain,
                idempotency_key=training_key(domain, number),
                task=await self._make_task(domain, task_number, stage=stage),
                purpose="train",
                source=self._domains[domain].source,
                stage=stage,
                task_number=None if chosen is None else chosen.task_number,
                results_known=0 if chosen is None else chosen.results_known,
                takes_known=True,  # A source may make another task of a number than before.
            )
        )

    async def request_evaluation(self, group: EvaluationGroup) -> GroupStatus:
        """Ask for the group of one held-out task."""
        return await self._gateway.request_group(
            GroupRequest(
                domain=group.domain,
                idempotency_key=group.idempotency_key,
                task=await self._make_task(group.domain, group.task_number),
                purpose="eval",
                group_size=group.samples,
                temperature=group.temperature,
                round_name=group.round_name,
                takes_known=True,
            )
        )

    async def play(self, status: GroupStatus, *, domain: str, is_training: bool) -> None:
        """Play what is free in the group until it retires.

        A training group that was never admitted is left when training ends.
        """
        current = await self._wait_for_slot(status, is_training=is_training)
        async with asyncio.TaskGroup() as playing:
            episodes: list[asyncio.Task[str]] = []
            while current is not None and current.state != "retired":
                async with self._claiming[is_training]:
                    episodes += [
                        self._start(claim, domain=domain, playing=playing, place=place)
                        async for claim, place in self._claim_free(
                            status.group_id, is_training=is_training
                        )
                    ]
                current = await self._read(current, wait_s=CLAIM_WAIT_S)
            for episode in episodes:
                episode.cancel()
        self._held -= {each for each in self._held if each.startswith(f"{status.group_id}.")}

    async def _wait_for_slot(self, status: GroupStatus, *, is_training: bool) -> GroupStatus | None:
        """Wait until the group is admitted; None if the gateway lost it or training ended first."""
        current: GroupStatus | None = status
        while current is not None and current.state == "requested":
            reading = self._read(current, wait_s=SLOT_WAIT_S)
            current = await (self._before_end(reading) if is_training else reading)
        return current

    async def _before_end(
        self, reading: Coroutine[None, None, GroupStatus | None]
    ) -> GroupStatus | None:
        """Wait for the answer; None if training ends before it comes."""
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(reading)
            end = tasks.create_task(self.training_ended.wait())
            await asyncio.wait((answer, end), return_when=asyncio.FIRST_COMPLETED)
            answer.cancel()
            end.cancel()
        return None if answer.cancelled() else answer.result()

    async def _read(self, known: GroupStatus, *, wait_s: float) -> GroupStatus | None:
        """Read the group's status; None if the gateway does not know the group."""
        try:
            return await self._gateway.read_group(known, wait_s=wait_s)
        except EpisodeOverError:
            return None

    async def _claim_free(
        self, group_id: str, *, is_training: bool
    ) -> AsyncIterator[tuple[Claim, Reservation]]:
        """Claim the group's free episodes, each as soon as this process has a place for it."""
        while True:
            place = await self._room.enter(is_training=is_training)
            claim = None
            try:
                claim = await self._claim(group_id)
            except EpisodeOverError:
                return
            finally:
                if claim is None:
                    place.leave()
            if claim is None:
                return
            yield claim, place

    async def _claim(self, group_id: str) -> Claim | None:
        """Claim an episode; one whose answer comes after a cancellation is held to be given back.

        Raises:
            EpisodeOverError: the group is over.
        """
        asking = asyncio.ensure_future(self._gateway.claim(group_id))
        try:
            claim = await asyncio.shield(asking)
        except asyncio.CancelledError:
            with suppress(GatewayError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S_MAX):
                    self._hold(await asking)
            raise
        self._hold(claim)
        return claim

    def _hold(self, claim: Claim | None) -> None:
        if claim is not None:
            self._held.add(claim.episode_id)

    def _start(
        self, claim: Claim, *, domain: str, playing: asyncio.TaskGroup, place: Reservation
    ) -> "asyncio.Task[str]":
        task = playing.create_task(self._player.play(claim, self._domains[domain].play))

        def end(ended: "asyncio.Task[str]") -> None:
            place.leave()
            if not ended.cancelled():
                self._held.discard(claim.episode_id)

        # Not a `finally` inside the task: one that is cancelled before it starts runs none.
        task.add_done_callback(end)
        return task

    async def _make_task(self, domain: str, task_number: int, *, stage: int | None = None) -> Raw:
        # In a thread: a source may read a data set, and heartbeats must go on meanwhile.
        source = self._domains[domain].task_source
        own = of_domain(self._stages, stage, domain=domain)
        hardness = {} if own is None or own.difficulty is None else {"difficulty": own.difficulty}
        task = await asyncio.to_thread(source, self._seed, domain, task_number, **hardness)
        return _in_json(task, name=f"queues.{domain}: task {task_number}")


def _in_json(task: object, *, name: str) -> Raw:
    """The task as its group's request carries it.

    Raises:
        UserCodeError: JSON has no form for it, or it is too long.
    """
    try:
        written = in_json(task)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserCodeError(f"{name} has no form in JSON: {error}") from error
    if fault := size_fault(written):
        raise UserCodeError(f"{name} {fault}")
    return Raw(written)
