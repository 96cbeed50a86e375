"""Chooses the tasks of a queue with a curriculum, by what the gateway tells of its results."""

import asyncio

from forgemq_agents.core.known_tasks import KnownTasks
from forgemq_agents.core.samplers import Sampler
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.groups import Chosen
from forgemq_agents.user_code import UserCodeError, sampled
from forgemq_contracts.admin import GroupStatus
from forgemq_contracts.curriculum import Curriculum


class TaskChoice:
    """The curriculum of one queue.

    Lifecycle: `choose` for a group, ask for it, `note` the answer; groups come in the order of
    their numbers. A group that was asked for before, by this process or another one, keeps the task
    that is on the log.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        *,
        domain: str,
        seed: int,
        sampler: Sampler,
        pool: int,
        gateway: GatewayClient,
    ) -> None:
        self._curriculum = curriculum
        self._domain, self._seed = domain, seed
        self._sampler = sampler
        self._gateway = gateway
        self._tasks = KnownTasks(pool, versions=curriculum.versions)

    async def choose(self, number: int) -> Chosen:
        """The task of group `number`, by all results that there are now.

        Raises:
            UserCodeError: The sampler returned no task of the pool, or the pool has lost tasks.
        """
        known = self._tasks
        results = await self._gateway.read_results(self._domain, after=known.results)
        self._check_pool(max((result.task_number for result in results), default=0))
        known.learn(results)
        key = f"{self._seed}/{self._domain}/{number}"
        # In a thread: it looks at every task of the pool.
        chosen = await asyncio.to_thread(self._sampler, known, key=key, curriculum=self._curriculum)
        name = f"queues.{self._domain}.curriculum.sampler"
        return Chosen(sampled(chosen, pool=len(known), name=name), known.results)

    def note(self, number: int, status: GroupStatus) -> None:
        """Note which task the group has; of one that is over the results tell it.

        Raises:
            UserCodeError: The pool has lost tasks.
        """
        if status.task_number is not None:
            self._check_pool(status.task_number)
            self._tasks.ask(number, status.task_number)

    def _check_pool(self, task_number: int) -> None:
        """Refuse a file that has fewer tasks than when the run asked for this one."""
        if task_number >= len(self._tasks):
            raise UserCodeError(
                f"queues.{self._domain}.curriculum: its pool has {len(self._tasks)} tasks, and the "
                f"run has asked for task {task_number}, counted from 0: continue it with the tasks "
                "that it began with"
            )
