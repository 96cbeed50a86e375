"""The grading loop: reads finished episodes and their completions, writes graded episodes.

A crash between a grade and the commit of its positions grades the episode a second time. That is
harmless: the group core counts the first grade of each episode.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable

import msgspec

from forgemq_bus.bounded_reads import read_to_end
from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Member, Place, Record, Writer
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode
from forgemq_contracts.groups import RetiredGroup
from forgemq_contracts.messages import Output
from forgemq_reward.core.pending import PendingEpisode, PendingEpisodes, take_oldest
from forgemq_reward.grader import Grader, load_rendering
from forgemq_reward.grader_processes import Places
from forgemq_reward.grading_positions import GROUP, GradingPositions
from forgemq_reward.settings import RewardSettings
from forgemq_shell.records import emit_of
from forgemq_shell.service import Context
from forgemq_shell.span_links import completion_traces
from forgemq_telemetry.traces import trace_headers

INPUTS = (topics.FINISHED_EPISODES, topics.FINISHED_COMPLETIONS, topics.RETIRED_GROUPS)
_READ_S = 0.2
"""One wait for records: how late the loop sees `stop`."""


class _Taken(msgspec.Struct, frozen=True):
    """An episode to grade; `pending` is that of its partition when it was taken."""

    partition: int
    pending: PendingEpisodes
    ready: PendingEpisode


class GradingLoop:
    """Grades the episodes of every group partition that this process is assigned."""

    def __init__(
        self,
        context: Context,
        settings: RewardSettings,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._settings = settings
        self._clock_s = clock_s
        self._partitions: dict[int, PendingEpisodes] = {}
        self._positions = GradingPositions(context.log, context.telemetry)
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Grade until `context.stop`.

        Raises:
            GraderRefusedError: a reward function of the configuration cannot be loaded.
        """
        rendering = await load_rendering(self._context.configuration)
        grader = Grader(
            self._context.configuration,
            self._settings,
            rendering=rendering,
            cores=len(os.sched_getaffinity(0)),
            environ=self._context.environ,
        )
        try:
            await grader.start()
            await self._run_with(grader)
        finally:
            await grader.close()

    async def _run_with(self, grader: Grader) -> None:
        writer = await self._context.log.writer()
        member = await self._context.log.member(
            group=GROUP,
            topics=[topic.name for topic in INPUTS],
            on_assigned=self._take_partitions,
            on_revoked=self._release_partitions,
        )
        try:
            async with asyncio.TaskGroup() as group:
                grading = group.create_task(self._grade_all(grader, writer))
                await self._read(member)
                grading.cancel()
            self._context.loop_watch.end("grading")
            await self._commit()
        finally:
            await member.close()
            await writer.close()
            await self._positions.close()

    async def _take_partitions(self, partitions: frozenset[int]) -> None:
        """Read what is graded and which groups are retired, before the first episode arrives."""
        for partition in sorted(partitions):
            pending = PendingEpisodes()
            graded = Place(topics.GRADED_EPISODES.name, partition)
            retired = Place(topics.RETIRED_GROUPS.name, partition)
            committed = await self._positions.take_over(partition)
            starts = await self._context.log.first_positions([graded, retired])
            # Retired groups are read from the first one: completions of a group that is not known
            # to be retired would stay in memory until the process ends.
            starts[graded] = committed.get(graded, starts[graded])
            async for records in read_to_end(self._context.log, starts):
                for record in records:
                    match _decoded(record):
                        case GradedEpisode() as grade:
                            pending.on_graded(grade.episode_id, offset=record.offset)
                        case RetiredGroup() as group:
                            pending.on_retired(group.group_id)
            self._partitions[partition] = pending
        self._context.telemetry.event("grading_assigned", partitions=sorted(partitions))

    async def _release_partitions(self, partitions: frozenset[int]) -> None:
        for partition in partitions:
            self._partitions.pop(partition, None)
        await self._positions.give_up(partitions)

    async def _read(self, member: Member) -> None:
        is_paused = False
        # All of them: a partition that is assigned during a pause waits for its end too.
        places = partitions_of(topics.FINISHED_EPISODES, self._context.configuration)
        committed_s = self._clock_s()
        while not self._context.stop.is_set():
            self._context.loop_watch.beat("grading")
            waiting = sum(map(len, self._partitions.values()))
            if is_paused != (waiting >= self._settings.episodes_waiting_max):
                is_paused = not is_paused
                (member.pause if is_paused else member.resume)(places)
                self._context.telemetry.gauge("reward.episodes_waiting", waiting)
            for record in await member.read(
                timeout_s=_READ_S, records_max=self._settings.records_max
            ):
                self._add(record)
            self._note_positions(member)
            if any(map(len, self._partitions.values())):
                self._wake.set()
            if self._clock_s() - committed_s >= self._settings.commit_every_s:
                await self._commit()
                committed_s = self._clock_s()

    def _add(self, record: Record) -> None:
        pending = self._partitions.get(record.partition)
        if pending is None:
            return
        match _decoded(record):
            case FinishedCompletion() as completion:
                pending.on_completion(completion, offset=record.offset)
            case FinishedEpisode() as episode:
                trace = trace_headers(record.headers)
                pending.on_episode(
                    episode, offset=record.offset, finished_ms=record.timestamp_ms, trace=trace
                )
            case RetiredGroup() as group:
                pending.on_retired(group.group_id)
            case None:
                # The transform reads the same topic and writes the dead letter.
                self._context.telemetry.event(
                    "bad_record_skipped",
                    topic=record.topic,
                    partition=record.partition,
                    offset=record.offset,
                )

    def _note_positions(self, member: Member) -> None:
        """Note how far completions were read: a manifest must not wait for trimmed ones."""
        for partition in member.assigned():
            if partition in self._partitions:
                place = Place(topics.FINISHED_COMPLETIONS.name, partition)
                self._partitions[partition].on_completions_read(member.position(place))

    async def _grade_all(self, grader: Grader, writer: Writer) -> None:
        """Begin the grading of each episode that is ready, as soon as its places allow it."""
        async with asyncio.TaskGroup() as gradings:
            while True:
                taken = self._take_ready(grader)
                if taken is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                places = grader.places(taken.ready.episode.domain)
                # Before the task runs: the next episode is taken meanwhile.
                places.count += 1
                grading = gradings.create_task(self._grade(grader, writer, taken))
                grading.add_done_callback(functools.partial(self._leave, places))

    def _leave(self, places: Places, grading: "asyncio.Task[None]") -> None:
        del grading
        places.count -= 1
        self._wake.set()

    def _take_ready(self, grader: Grader) -> _Taken | None:
        taken = take_oldest(self._partitions, lambda domain: grader.places(domain).is_free)
        if taken is None:
            return None
        partition, ready = taken
        return _Taken(partition, self._partitions[partition], ready)

    async def _grade(self, grader: Grader, writer: Writer, taken: _Taken) -> None:
        pending, ready, telemetry = taken.pending, taken.ready, self._context.telemetry
        began_s, domain = self._clock_s(), ready.episode.domain
        links = completion_traces(ready.episode) if telemetry.is_exporting else ()
        with telemetry.span("grade", parent=ready.trace, links=links, domain=domain) as span:
            grade = await grader.grade(ready.episode, pending)
            output = Output(
                topic=topics.GRADED_EPISODES.name, partition=taken.partition, record=grade
            )
            offset = await writer.write(emit_of(output, headers=span.headers()))
        pending.on_graded(grade.episode_id, offset=offset)
        telemetry.count("reward.episodes_graded", domain=domain)
        telemetry.observe("reward.grade_s", self._clock_s() - began_s, domain=domain)
        if grade.is_masked:
            telemetry.count("reward.episodes_masked", domain=domain)
            telemetry.event("masked", episode=grade.episode_id, detail=grade.detail)

    async def _commit(self) -> None:
        """Say from where a restart has to read, for every partition that is still held."""
        for partition in list(self._partitions):
            pending = self._partitions.get(partition)
            if pending is not None:
                await self._positions.commit(partition, pending.positions())


def _decoded(record: Record) -> msgspec.Struct | None:
    try:
        return decoded_record(record)
    except msgspec.ValidationError:
        return None
