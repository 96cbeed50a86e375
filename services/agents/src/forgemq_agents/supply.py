"""Keeps one queue supplied with groups: how many, of which stage, until training ends."""

import asyncio
import itertools

from forgemq_agents.core.schedule import groups_ahead, stage_of_request
from forgemq_agents.errors import GatewayError, TrainingEndedError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.groups import Groups
from forgemq_agents.task_choice import TaskChoice
from forgemq_contracts.admin import GroupStatus
from forgemq_contracts.mixture import mixture_of
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_telemetry.telemetry import Telemetry


class Supply:
    """Asks for the groups of one queue, and has them played."""

    def __init__(
        self,
        configuration: RunConfiguration,
        queue: Queue,
        *,
        gateway: GatewayClient,
        groups: Groups,
        choice: TaskChoice | None,
        telemetry: Telemetry,
    ) -> None:
        self._queue = queue
        self._number = configuration.queues.index(queue)
        self._mixture = mixture_of(configuration)
        self._has_stages = bool(configuration.stages)
        self._gateway = gateway
        self._groups = groups
        self._choice = choice
        self._telemetry = telemetry

    async def play(self) -> None:
        """Keep N + P groups asked for, and play them, until training ends."""
        ahead_max = groups_ahead(self._queue, groups_max=self._mixture.groups_max(self._number))
        room = asyncio.Semaphore(ahead_max)
        playing: set[asyncio.Task[None]] = set()
        status = await self._gateway.read_run()
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count(status.first_tasks.get(self._queue.domain, 0)):
                await room.acquire()
                try:
                    group = await self._request(number, outstanding=len(playing))
                except TrainingEndedError:
                    self._groups.training_ended.set()
                    return
                task = tasks.create_task(
                    self._groups.play(group, domain=self._queue.domain, is_training=True)
                )
                playing.add(task)
                task.add_done_callback(playing.discard)
                task.add_done_callback(lambda _: room.release())

    async def _request(self, number: int, *, outstanding: int) -> GroupStatus:
        """Ask until the gateway has room for the group, however long that takes."""
        domain = self._queue.domain
        while True:
            stage = await self._stage(outstanding) if self._has_stages else None
            chosen = None if self._choice is None else await self._choice.choose(number)
            try:
                status = await self._groups.request_training(
                    domain, number, stage=stage, chosen=chosen
                )
            except GatewayError as error:
                if error.status != 429:
                    raise
                self._telemetry.event("no_room", domain=domain, task_number=number)
            else:
                if self._choice is not None:
                    self._choice.note(number, status)
                return status

    async def _stage(self, outstanding: int) -> int | None:
        status = await self._gateway.read_run()
        return stage_of_request(
            self._mixture,
            self._number,
            steps_trained=status.steps_trained,
            outstanding=outstanding,
        )
