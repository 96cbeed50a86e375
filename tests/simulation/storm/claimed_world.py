"""What is around gateway, scheduler and reward core: lanes, a grader, a merger and a trainer.

They have no faults of their own but the lanes: engines fail requests, and are replaced.
"""

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Callable

import msgspec

from forgemq_bus.log import Place, Record
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import (
    FailureKind,
    FinishedCompletion,
    RequestedCompletion,
    WeightSpan,
)
from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode
from forgemq_contracts.groups import MergedGroup, ScoredGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_shell.records import emit_of
from tests.simulation.storm.faults import Faults, Point
from tests.unit.scheduler.scene import METRICS

HEARTBEAT_S = 1.0
_READ_S = 30.0


class ClaimedWorld:
    """Reads what the services write and answers it, a while later.

    Args:
        log: Of the run, without faults.
        rng: Draws delays, and what fails.
        engine_faults: What happens to the engines beside that.
    """

    def __init__(
        self,
        log: MemoryLog,
        configuration: RunConfiguration,
        *,
        rng: random.Random,
        engine_faults: Faults,
    ) -> None:
        self._log = log
        self._configuration = configuration
        self._rng = rng
        self.engine_faults = engine_faults
        self._published = 0
        self._versions: dict[str, int] = {}

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._configuration.log.lanes):
                tasks.create_task(Lane(number, self).run())
            tasks.create_task(self._answer_all(topics.FINISHED_EPISODES, self._grade))
            tasks.create_task(self._answer_all(topics.SCORED_GROUPS, self._merge))
            tasks.create_task(self._train())

    async def write(self, topic: topics.Topic, partition: int, record: msgspec.Struct) -> None:
        """Write one record."""
        writer = await self._log.writer()
        await writer.write(emit_of(Output(topic=topic.name, partition=partition, record=record)))

    async def records(self, *places: Place) -> AsyncIterator[tuple[Record, msgspec.Struct]]:
        """Every record of these partitions from the beginning, as it comes."""
        reader = await self._log.reader(dict.fromkeys(places, 0))
        while True:
            for record in await reader.read(timeout_s=_READ_S, records_max=100):
                yield record, topics.decode(topics.BY_NAME[record.topic], record.value)

    def delay_s(self) -> float:
        """How long one answer takes."""
        return self._rng.choice((0.05, 0.2, 0.8))

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return self._rng.random() < probability

    @property
    def published(self) -> int:
        """The newest version of the weights."""
        return self._published

    def group_partition(self, group_id: str) -> int:
        """Partition of a group."""
        return group_partition(group_id, partitions=self._configuration.log.group_partitions)

    def note_version(self, request_id: str, version: int) -> None:
        """Note which weights sampled a completion."""
        self._versions[request_id] = version

    async def _answer_all(
        self, topic: topics.Topic, answer: Callable[[msgspec.Struct], tuple[Output, ...]]
    ) -> None:
        writer = await self._log.writer()
        async for _, record in self.records(*partitions_of(topic, self._configuration)):
            await asyncio.sleep(self.delay_s())
            await writer.write_all([emit_of(output) for output in answer(record)])

    def _grade(self, episode: msgspec.Struct) -> tuple[Output, ...]:
        assert isinstance(episode, FinishedEpisode)
        if episode.status != "completed":
            return ()
        partition = self.group_partition(episode.group_id)
        grade = GradedEpisode(
            episode_id=episode.episode_id,
            group_id=episode.group_id,
            grader="storm:outcome",
            grader_version="1",
            outcome=outcome_of(episode.episode_id),
            speed=0.0,
        )
        return (Output(topic=topics.GRADED_EPISODES.name, partition=partition, record=grade),)

    def _merge(self, scored: msgspec.Struct) -> tuple[Output, ...]:
        assert isinstance(scored, ScoredGroup)
        partition = self.group_partition(scored.group_id)
        versions = [self._versions[each.completion_id] for each in scored.completions]
        merged = MergedGroup(
            group_id=scored.group_id,
            domain=scored.domain,
            purpose=scored.purpose,
            partition=partition,
            tree_sha256=None if scored.not_trainable else "0" * 64,
            version_min=min(versions, default=0),
            not_trainable=scored.not_trainable,
            detail=scored.detail,
        )
        return (Output(topic=topics.MERGED_GROUPS.name, partition=partition, record=merged),)

    async def _train(self) -> None:
        async for _, step in self.records(Place(topics.SCHEDULED_STEPS.name, 0)):
            assert isinstance(step, ScheduledStep)
            await asyncio.sleep(1 + self.delay_s())
            self._published = step.step + 1
            trained = TrainedStep(
                step=step.step,
                lineage=1,
                group_ids=tuple(group.group_id for group in step.groups),
                failed_group_ids=(),
                metrics=METRICS,
                checkpoint_step=step.step,
                duration_s=0.0,
                is_last=step.is_last,
            )
            await self.write(topics.TRAINED_STEPS, 0, trained)


class Lane:
    """One engine: it samples, loads weights, fails now and then, and may be replaced."""

    def __init__(self, number: int, world: ClaimedWorld) -> None:
        self._number = number
        self._world = world
        self._epoch = 1
        self._version = 0
        self._known: set[str] = set()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report())
            place = Place(topics.REQUESTED_COMPLETIONS.name, self._number)
            async for _, asked in self._world.records(place):
                assert isinstance(asked, RequestedCompletion)
                if asked.epoch == self._epoch:
                    tasks.create_task(self._sample(asked))

    async def _report(self) -> None:
        while True:
            if self._version < self._world.published:
                self._version = self._world.published
                loaded = LoadedWeights(
                    lane=self._number,
                    epoch=self._epoch,
                    lineage=1,
                    version=self._version,
                    path="fast",
                    duration_s=0.0,
                )
                await self._world.write(topics.LOADED_WEIGHTS, self._number, loaded)
            report = ReportedEngine(
                lane=self._number,
                epoch=self._epoch,
                url="",
                is_serving=True,
                lineage=1,
                version=self._version,
                running=0,
                queued=0,
                reported_ms=round(1000 * asyncio.get_running_loop().time()),
            )
            await self._world.write(topics.REPORTED_ENGINES, self._number, report)
            await asyncio.sleep(HEARTBEAT_S)
            if self._world.happens(0.02):
                self._replace()

    def _replace(self) -> None:
        """Start the engine again; what it was asked before is gone."""
        self._epoch += 1
        self._known.clear()

    def _is_killed_at(self, point: Point) -> bool:
        """Whether the engine is replaced at this point."""
        fault = self._world.engine_faults.at(point)
        if fault is not None:
            self._replace()
        return fault is not None

    async def _sample(self, asked: RequestedCompletion) -> None:
        version = self._version
        if self._is_killed_at("asked"):
            return
        await asyncio.sleep(self._world.delay_s())
        if asked.epoch != self._epoch or self._is_killed_at("sampled"):
            return  # The process that had it is gone.
        failure: FailureKind | None = None
        if asked.is_delta and asked.parent_id not in self._known:
            failure = "context_missing"
        elif self._world.happens(0.05):
            failure = "engine"
        else:
            self._known.add(asked.request_id)
            self._world.note_version(asked.request_id, version)
        own = asked.context if asked.is_delta else asked.context[asked.shared_prefix_tokens * 4 :]
        count = 0 if failure else 2
        finished = FinishedCompletion(
            request_id=asked.request_id,
            attempt=asked.attempt,
            episode_id=asked.episode_id,
            group_id=asked.group_id,
            lane=self._number,
            epoch=asked.epoch,
            finish_reason="error" if failure else "stop",
            turn=asked.turn,
            parent_id=asked.parent_id,
            shared_prefix_tokens=asked.shared_prefix_tokens,
            context=own,
            output=pack_ids([9] * count),
            logprobs=pack_floats([-0.5] * count),
            spans=(WeightSpan(start=0, end=2, lineage=1, version=version),) if count else (),
            failure=failure,
        )
        partition = self._world.group_partition(asked.group_id)
        await self._world.write(topics.FINISHED_COMPLETIONS, partition, finished)
        self._is_killed_at("answered")


def outcome_of(episode_id: str) -> float:
    """What the grader says; different for most siblings."""
    return float(zlib.crc32(episode_id.encode()) % 5)
