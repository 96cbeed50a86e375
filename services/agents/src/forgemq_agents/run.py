"""The phases of a run on the agent side: training with round `start` beside it, then round `end`.

Round `start` measures the base model, so the trainer publishes version 1 only when it is over. It
begins before training, so that the trainer can see it, and training is played beside it.

Idempotency keys name the groups, so a process that was killed goes on where training is: the
gateway says which task of a domain is the first that is not over. Groups beyond it that are done
answer `retired` and are skipped, and episodes that the killed process held are claimed when their
leases have lapsed.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence

from forgemq_agents.core.schedule import (
    EvaluationGroup,
    evaluation_groups,
    judged_groups,
    plays_start_round,
    round_due,
)
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.groups import Groups
from forgemq_agents.supply import Supply
from forgemq_agents.task_choice import TaskChoice
from forgemq_contracts.queues import supplied_queues
from forgemq_contracts.rounds import END_ROUND, JUDGED_ROUND, START_ROUND
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_telemetry.telemetry import Telemetry


class AgentRun:
    """Plays one run to its end."""

    def __init__(
        self,
        configuration: RunConfiguration,
        *,
        gateway: GatewayClient,
        groups: Groups,
        choices: Mapping[str, TaskChoice],
        telemetry: Telemetry,
        poll_s: float,
    ) -> None:
        self._configuration = configuration
        self._gateway = gateway
        self._groups = groups
        self._choices = choices
        self._telemetry = telemetry
        self._poll_s = poll_s

    async def play(self) -> None:
        """Play everything the run needs from agents; returns when nothing is left to play."""
        status = await self._gateway.read_run()
        async with asyncio.TaskGroup() as tasks:
            start: asyncio.Task[None] | None = None
            if plays_start_round(steps_trained=status.steps_trained):
                await self._begin_round(START_ROUND)
                start = tasks.create_task(self._play_round(START_ROUND))
            if not status.training_ended:
                await self._play_training(start)
        await self._play_round(END_ROUND)
        self._telemetry.event("played", run=self._configuration.run)

    async def judge(self, *, samples: int) -> None:
        """Play so many episodes of each held-out task, and nothing else."""
        await self._play_groups(
            JUDGED_ROUND, list(judged_groups(self._configuration, samples=samples))
        )
        self._telemetry.event("played", run=self._configuration.run)

    async def _play_training(self, start: asyncio.Task[None] | None) -> None:
        self._telemetry.event("training", run=self._configuration.run)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_run(start))
            for queue in supplied_queues(self._configuration):
                tasks.create_task(self._supply(queue).play())

    def _supply(self, queue: Queue) -> Supply:
        return Supply(
            self._configuration,
            queue,
            gateway=self._gateway,
            groups=self._groups,
            choice=self._choices.get(queue.domain),
            telemetry=self._telemetry,
        )

    async def _watch_run(self, playing: asyncio.Task[None] | None) -> None:
        """Poll the run: start periodic rounds, one at a time, and note the end of training.

        Args:
            playing: A round that is played already.
        """
        last_round: str | None = None
        async with asyncio.TaskGroup() as rounds:
            while not self._groups.training_ended.is_set():
                status = await self._gateway.read_run()
                if status.training_ended:
                    self._groups.training_ended.set()
                    return
                due = round_due(
                    self._configuration.evaluation,
                    steps_trained=status.steps_trained,
                    steps=status.steps,
                )
                is_free = playing is None or playing.done()
                if due is not None and due != last_round and is_free:
                    last_round = due
                    playing = rounds.create_task(self._play_round(due))
                await asyncio.sleep(self._poll_s)

    async def _begin_round(self, name: str) -> None:
        """Ask for the round's first group; an answer means that it is on the log."""
        for group in itertools.islice(evaluation_groups(self._configuration, round_name=name), 1):
            await self._groups.request_evaluation(group)

    async def _play_round(self, name: str) -> None:
        """Play every held-out task once, sampled and greedy."""
        await self._play_groups(name, list(evaluation_groups(self._configuration, round_name=name)))

    async def _play_groups(self, name: str, queue: Sequence[EvaluationGroup]) -> None:
        if not queue:
            return
        self._telemetry.event("evaluating", round=name, episodes=len(queue))
        waiting = iter(queue)
        workers = min(len(queue), self._configuration.episodes.concurrent_max)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(workers):
                tasks.create_task(self._evaluate(waiting))
        self._telemetry.event("evaluated", round=name)

    async def _evaluate(self, waiting: Iterator[EvaluationGroup]) -> None:
        for group in waiting:
            status = await self._groups.request_evaluation(group)
            await self._groups.play(status, domain=group.domain, is_training=False)
