"""A transform service: one pure core per partition of its journal.

The processes of the service share the journal's partitions in a consumer group; each assigned
partition is one `TransformTask`. The scheduler's journal has one partition, so one process is
active and the others stand by.

    transform = Transform(
        service="merger",
        inputs=(topics.SCORED_GROUPS, topics.FINISHED_COMPLETIONS, topics.RETIRED_GROUPS),
        journal=topics.MERGER_JOURNAL,
        make_core=lambda partition: MergerCore(partition),
        logic_version=LOGIC_VERSION,
    )
    await transform.run(context)
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forgemq_bus.errors import FencedError
from forgemq_bus.log import Log, Place
from forgemq_bus.partitions import dead_letters_of, partitions_of
from forgemq_contracts import topics
from forgemq_contracts.messages import Core
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import Topic
from forgemq_settings.environment import parse
from forgemq_shell.interruption import wait_at_most
from forgemq_shell.loop_watch import LoopWatch
from forgemq_shell.task import TransformTask
from forgemq_shell.task_plan import TaskPlan
from forgemq_shell.transform_settings import TransformSettings
from forgemq_telemetry.telemetry import Telemetry

_MEMBER_READ_S = 0.25
"""One wait for a change of the assignment: how late the service sees `stop`."""


class TransformContext(Protocol):
    """The part of `service.Context` that a transform needs."""

    @property
    def configuration(self) -> RunConfiguration:
        """The run's configuration."""
        ...

    @property
    def log(self) -> Log:
        """The run's log."""
        ...

    @property
    def telemetry(self) -> Telemetry:
        """Telemetry of the service."""
        ...

    @property
    def stop(self) -> asyncio.Event:
        """Set when the service is to end."""
        ...

    @property
    def environ(self) -> Mapping[str, str]:
        """Holds `FORGEMQ_TRANSFORM_*`."""
        ...

    @property
    def loop_watch(self) -> LoopWatch:
        """Notes when each loop turned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Wiring of one transform service.

    Attributes:
        service: Name; prefix of consumer groups and transactional ids.
        inputs: Topics it reads. If the journal is partitioned by group, so must they be, and task
            p reads partition p of each. If it is partitioned by run, the only task reads all.
        journal: Journal topic.
        make_core: Makes a fresh core for a journal partition.
        logic_version: Of the core: raised with each change of what it writes for old inputs.
        snapshots_since: Lowest logic version that goes on from the core's snapshots; 0: its own.
        tick_s: Seconds between two ticks; 0: the core gets none.
        dead_letters: Topics whose dead letters it also reads, as `DeadLetter`; only if its journal
            is partitioned by run, since all letters about a topic are in one partition.
    """

    service: str
    inputs: tuple[Topic, ...]
    journal: Topic
    make_core: Callable[[int], Core]
    logic_version: int
    snapshots_since: int = 0
    tick_s: float = 0.0
    dead_letters: tuple[Topic, ...] = ()

    def __post_init__(self) -> None:
        """Check that every input is partitioned as the journal's tasks read it."""
        if self.journal.partitioned_by != "group":
            return
        others = [topic.name for topic in self.inputs if topic.partitioned_by != "group"]
        others += [topic.dlq_name for topic in self.dead_letters]
        if others:
            raise ValueError(f"{self.service}: not partitioned by group as its journal: {others}")

    async def run(self, context: TransformContext) -> None:
        """Run a task for each partition that the group assigns, until `context.stop`.

        Raises:
            ExceptionGroup: with the error that ended a task: see `TransformTask.run`.
        """
        async with asyncio.TaskGroup() as group:
            tasks = _Tasks(self, context, group)
            member = await context.log.member(
                group=self.service,
                topics=[self.journal.name],
                on_assigned=tasks.start,
                on_revoked=tasks.stop,
                has_records=False,  # The tasks read the journal themselves.
            )
            try:
                while not context.stop.is_set():
                    context.loop_watch.beat("member")
                    await member.read(timeout_s=_MEMBER_READ_S, records_max=1)
            finally:
                context.loop_watch.end("member")
                await tasks.close()
                await member.close()

    def plan(
        self, partition: int, *, configuration: RunConfiguration, settings: TransformSettings
    ) -> TaskPlan:
        """The plan of the task of this journal partition."""
        return TaskPlan(
            service=self.service,
            journal=Place(self.journal.name, partition),
            inputs=(
                *self._places(self.inputs, partition, configuration),
                *(dead_letters_of(topic) for topic in self.dead_letters),
            ),
            tick_s=self.tick_s,
            logic_version=self.logic_version,
            snapshots_since=self.snapshots_since,
            settings=settings,
        )

    def partitions(self, configuration: RunConfiguration) -> int:
        """Number of tasks in the run: one per partition of the journal."""
        return len(partitions_of(self.journal, configuration))

    def output_places(
        self, partition: int, *, configuration: RunConfiguration
    ) -> tuple[Place, ...]:
        """Every partition that this task may write to, except its journal."""
        written = [
            topic
            for topic in topics.OF_RUN
            if topic.producer == self.service and topic.is_transactional and topic != self.journal
        ]
        dead = [dead_letters_of(topic) for topic in self.inputs if topic.has_dlq]
        return (*self._places(written, partition, configuration), *dead)

    def _places(
        self,
        of: Sequence[Topic],
        partition: int,
        configuration: RunConfiguration,
    ) -> tuple[Place, ...]:
        places = [partitions_of(topic, configuration) for topic in of]
        if self.journal.partitioned_by == "group":
            return tuple(numbered[partition] for numbered in places)
        return tuple(place for numbered in places for place in numbered)


class _Tasks:
    """The running tasks of this process."""

    def __init__(
        self, transform: Transform, context: TransformContext, group: asyncio.TaskGroup
    ) -> None:
        self._transform = transform
        self._context = context
        self._group = group
        self._settings = parse(
            TransformSettings, prefix="FORGEMQ_TRANSFORM_", environ=context.environ
        )
        self._stops: dict[int, asyncio.Event] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False

    @property
    def held(self) -> frozenset[int]:
        """Partitions with a task."""
        return frozenset(self._running)

    async def start(self, partitions: frozenset[int]) -> None:
        """Start tasks for newly assigned partitions; they restore in the background."""
        if self._is_closed:
            # The process is leaving, and the group has not noticed yet.
            return
        for partition in sorted(partitions - self.held):
            stop = asyncio.Event()
            self._stops[partition] = stop
            self._running[partition] = self._group.create_task(self._run(partition, stop))
        self._report("assigned", partitions)

    async def stop(self, partitions: frozenset[int]) -> None:
        """Stop the tasks of revoked partitions; returns after their last commit."""
        stopped = sorted(partitions & self.held)
        for partition in stopped:
            self._stops[partition].set()
        if stopped:
            await asyncio.wait([self._running[partition] for partition in stopped])
        for partition in stopped:
            self._running.pop(partition, None)
            self._stops.pop(partition, None)
        self._report("revoked", partitions)

    async def close(self) -> None:
        """Stop every task; later assignments start none."""
        self._is_closed = True
        await self.stop(self.held)

    def _report(self, event: str, partitions: frozenset[int]) -> None:
        telemetry = self._context.telemetry
        telemetry.event(event, partitions=sorted(partitions), held=sorted(self.held))
        telemetry.gauge("transform.tasks", len(self._running))

    async def _run(self, partition: int, stop: asyncio.Event) -> None:
        context = self._context
        loop = f"task-{partition}"
        while not stop.is_set():
            task = TransformTask(
                self._transform.plan(
                    partition, configuration=context.configuration, settings=self._settings
                ),
                log=context.log,
                core=self._transform.make_core(partition),
                telemetry=context.telemetry,
                stop=stop,
                # A simulation's loop has its own time; any other loop has the monotonic clock.
                clock_s=asyncio.get_running_loop().time,
                turned=lambda: context.loop_watch.beat(loop),
            )
            try:
                await task.run()
            except FencedError as error:
                context.telemetry.count("transform.fenced")
                context.telemetry.event("fenced", partition=partition, error=str(error))
                # Not fatal: the fencing writer may be a process that hung, lost the partition and
                # woke up late. While this process is assigned the partition, it takes it back.
                await wait_at_most(stop, self._settings.refence_after_s)
            finally:
                context.loop_watch.end(loop)
