"""The transform service: a pure core for every partition of its journal that this process holds.

A process joins a consumer group on the journal topic only; every partition it is assigned is one
`TransformTask`. A service whose journal has one partition for the run (the scheduler) has one
active process, and any number standing by.

    transform = Transform(
        service="merger",
        inputs=(topics.SCORED_GROUPS, topics.FINISHED_COMPLETIONS, topics.RETIRED_GROUPS),
        journal=topics.MERGER_JOURNAL,
        make_core=lambda partition: MergerCore(partition=partition),
    )
    await transform.run(context)
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from forgemq_bus.errors import FencedError
from forgemq_bus.log import Log, Place
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.messages import Core
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import Topic
from forgemq_settings.environment import parse
from forgemq_shell.task import TaskPlan, TransformTask
from forgemq_shell.transform_settings import TransformSettings
from forgemq_telemetry.telemetry import Telemetry

_MEMBER_READ_S = 0.25


class TransformContext(Protocol):
    """The part of `service.Context` that a transform needs."""

    @property
    def configuration(self) -> RunConfiguration:
        """Of the run."""
        ...

    @property
    def log(self) -> Log:
        """Of the run."""
        ...

    @property
    def telemetry(self) -> Telemetry:
        """Of the service."""
        ...

    @property
    def stop(self) -> asyncio.Event:
        """Set when the service is to end."""
        ...

    @property
    def environ(self) -> Mapping[str, str]:
        """Holds `FORGEMQ_TRANSFORM_*`."""
        ...


class Transform:
    """Wiring of one transform service.

    Args:
        service: Its name; prefix of groups and transactional ids.
        inputs: Topics it reads. Where the journal is partitioned by group, they are too, and task
            p reads partition p of each; where it is partitioned by run, the only task reads all.
        journal: Its journal topic.
        make_core: Fresh core for a journal partition.
        tick_s: Between two ticks, in seconds; 0: the core gets none.
        dead_letters: Topics whose dead letters it reads too, as `DeadLetter`.
    """

    def __init__(
        self,
        *,
        service: str,
        inputs: tuple[Topic, ...],
        journal: Topic,
        make_core: Callable[[int], Core],
        tick_s: float = 0.0,
        dead_letters: tuple[Topic, ...] = (),
    ) -> None:
        if journal.partitioned_by == "group":
            strangers = [
                topic.name for topic in (*inputs, *dead_letters) if topic.partitioned_by != "group"
            ]
            if strangers:
                raise ValueError(f"{service}: not partitioned by group as its journal: {strangers}")
        self._service = service
        self._inputs = inputs
        self._journal = journal
        self._make_core = make_core
        self._tick_s = tick_s
        self._dead_letters = dead_letters

    async def run(self, context: TransformContext) -> None:
        """Hold the partitions that the group assigns, until `context.stop`.

        Raises:
            ExceptionGroup: of what ended a task: see `TransformTask.run`.
        """
        async with asyncio.TaskGroup() as group:
            tasks = _Tasks(self, context, group)
            member = await context.log.member(
                group=self._service,
                topics=[self._journal.name],
                on_assigned=tasks.start,
                on_revoked=tasks.stop,
            )
            paused: frozenset[int] = frozenset()
            try:
                while not context.stop.is_set():
                    # Membership only: the journal's records are read by the tasks.
                    await member.read(timeout_s=_MEMBER_READ_S, records_max=1)
                    if (assigned := member.assigned()) != paused:
                        member.pause([Place(self._journal.name, p) for p in sorted(assigned)])
                        paused = assigned
            finally:
                await tasks.close()
                await member.close()

    def plan(
        self, partition: int, *, configuration: RunConfiguration, settings: TransformSettings
    ) -> TaskPlan:
        """What the task of this journal partition reads and how."""
        return TaskPlan(
            service=self._service,
            journal=Place(self._journal.name, partition),
            inputs=(
                *self._places(self._inputs, partition, configuration),
                *self._places(self._dead_letters, partition, configuration, are_dead=True),
            ),
            tick_s=self._tick_s,
            logic_version=configuration.logic_version,
            settings=settings,
        )

    def core(self, partition: int) -> Core:
        """A fresh core for this journal partition."""
        return self._make_core(partition)

    def partitions(self, configuration: RunConfiguration) -> int:
        """Number of its tasks in the run: partitions of its journal."""
        return len(partitions_of(self._journal, configuration))

    def output_places(
        self, partition: int, *, configuration: RunConfiguration
    ) -> tuple[Place, ...]:
        """Every partition that this task may write to, dead letters included, its journal not."""
        written = [
            topic
            for topic in topics.OF_RUN
            if topic.producer == self._service and topic.is_transactional and topic != self._journal
        ]
        dead = [
            Place(topics.BY_NAME[place.topic].dlq_name, place.partition)
            for place in self._places(self._inputs, partition, configuration)
            if topics.BY_NAME[place.topic].has_dlq
        ]
        return (*self._places(written, partition, configuration), *dead)

    def _places(
        self,
        of: Sequence[Topic],
        partition: int,
        configuration: RunConfiguration,
        *,
        are_dead: bool = False,
    ) -> tuple[Place, ...]:
        named = [(topic, topic.dlq_name if are_dead else topic.name) for topic in of]
        if self._journal.partitioned_by == "group":
            return tuple(Place(name, partition) for _, name in named)
        return tuple(
            Place(name, number)
            for topic, name in named
            for _, number in partitions_of(topic, configuration)
        )


class _Tasks:
    """The tasks of the partitions this process holds."""

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
        """The group assigned these; their tasks restore in the background."""
        if self._is_closed:
            # The group does not know yet that this process is about to leave it.
            return
        for partition in sorted(partitions - self.held):
            stop = asyncio.Event()
            self._stops[partition] = stop
            self._running[partition] = self._group.create_task(self._run(partition, stop))
        self._report("assigned", partitions)

    async def stop(self, partitions: frozenset[int]) -> None:
        """The group took these away; returns once their tasks have written their last batch."""
        mine = sorted(partitions & self.held)
        for partition in mine:
            self._stops[partition].set()
        if mine:
            await asyncio.wait([self._running[partition] for partition in mine])
        for partition in mine:
            self._running.pop(partition, None)
            self._stops.pop(partition, None)
        self._report("revoked", partitions)

    async def close(self) -> None:
        """Stop every task, and start none from now on."""
        self._is_closed = True
        await self.stop(self.held)

    def _report(self, event: str, partitions: frozenset[int]) -> None:
        telemetry = self._context.telemetry
        telemetry.event(event, partitions=sorted(partitions), held=sorted(self.held))
        telemetry.gauge("transform.tasks", len(self._running))

    async def _run(self, partition: int, stop: asyncio.Event) -> None:
        context = self._context
        while not stop.is_set():
            task = TransformTask(
                self._transform.plan(
                    partition, configuration=context.configuration, settings=self._settings
                ),
                log=context.log,
                core=self._transform.core(partition),
                telemetry=context.telemetry,
                stop=stop,
            )
            try:
                await task.run()
            except FencedError as error:
                context.telemetry.count("transform.fenced")
                context.telemetry.event("fenced", partition=partition, error=str(error))
                # A process that lost the partition long ago may have fenced us by waking up late;
                # whoever still is assigned takes it back.
                await _event_or_timeout(stop, self._settings.refence_after_s)


async def _event_or_timeout(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
