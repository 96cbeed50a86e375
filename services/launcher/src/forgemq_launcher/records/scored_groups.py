"""The scored groups of a run with all their records, one after the other, with bounded memory.

A scored group names its episodes, and their ends name their completions. All are in partitions of
the same number, and each was written before what names it. So each topic is read once, forward, as
far as the next group needs it. What is held meanwhile is of the groups that were open beside it: N
slots of each queue, as in the services.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from forgemq_bus.kept_records import messages_of, read_from
from forgemq_bus.log import Log, Place
from forgemq_contracts.accounting import CompletionLedger, RetiredIds
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode
from forgemq_contracts.groups import RetiredGroup, ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import (
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    GRADED_EPISODES,
    RETIRED_GROUPS,
    SCORED_GROUPS,
    Topic,
    partition_count,
)
from forgemq_episode_files.rows import ScoredRecords

_NEVER_SCORED = ("expired", "cancelled")


async def scored_groups(log: Log, configuration: RunConfiguration) -> AsyncIterator[ScoredRecords]:
    """Every group that is scored when its partition is begun, with what the log still has of it.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    for partition in range(partition_count(SCORED_GROUPS, configuration)):
        joined = PartitionGroups(log, partition)
        async for records in joined.groups():
            yield records


class PartitionGroups:
    """The scored groups of the partitions of one number.

    Lifecycle: iterate `groups` once. Records are held until their group has been given out.
    """

    def __init__(self, log: Log, partition: int) -> None:
        self._log = log
        self._partition = partition
        self._episodes: dict[str, dict[str, FinishedEpisode]] = defaultdict(dict)
        self._grades: dict[str, dict[str, GradedEpisode]] = defaultdict(dict)
        self._completions: dict[str, dict[str, FinishedCompletion]] = defaultdict(dict)
        self._ledger = CompletionLedger()
        self._over = RetiredIds()

    @property
    def held(self) -> int:
        """Completions of groups that were not given out so far."""
        return sum(map(len, self._completions.values()))

    async def groups(self) -> AsyncIterator[ScoredRecords]:
        """Every scored group, in the order of their scores."""
        # The scores' end is taken first: what a score refers to was written before it.
        scores = await _Feed.of(self._log, SCORED_GROUPS, self._partition)
        retired = await _Feed.of(self._log, RETIRED_GROUPS, self._partition)
        others = (FINISHED_EPISODES, GRADED_EPISODES, FINISHED_COMPLETIONS)
        feeds = [await _Feed.of(self._log, topic, self._partition) for topic in others]
        try:
            async for message in scores.messages():
                # A group that ended without a score would be held to the end. One that was
                # cancelled after its score, as all are at the end of a run, is given out.
                await retired.read_before(message.timestamp_ms, self._drop)
                scored = message.record
                if isinstance(scored, ScoredGroup) and scored.group_id not in self._over:
                    await self._read_for(scored, *feeds)
                    yield self._taken(scored)
        finally:
            for feed in (scores, retired, *feeds):
                await feed.close()

    async def _read_for(
        self, scored: ScoredGroup, episodes: "_Feed", grades: "_Feed", completions: "_Feed"
    ) -> None:
        wanted = {score.episode_id for score in scored.episodes}
        held = self._episodes[scored.group_id]
        await episodes.read(self._take, until=lambda: wanted <= held.keys())
        graded = {
            score.episode_id
            for score in scored.episodes
            if score.episode_id in held and not score.is_masked
        }
        known = self._grades[scored.group_id]
        await grades.read(self._take, until=lambda: graded <= known.keys())
        last = max((e.offset for each in held.values() for e in each.manifest), default=-1)
        await completions.read(self._take, until=lambda: completions.offset >= last)

    def _take(self, message: Message) -> None:
        record = message.record
        match record:
            case FinishedEpisode() | GradedEpisode() | FinishedCompletion() if (
                record.group_id in self._over
            ):
                pass
            case FinishedEpisode():
                self._episodes[record.group_id].setdefault(record.episode_id, record)
            case GradedEpisode():
                self._grades[record.group_id].setdefault(record.episode_id, record)
            case FinishedCompletion() if self._ledger.observe(record, offset=message.offset):
                self._completions[record.group_id][record.request_id] = record
            case _:
                pass

    def _drop(self, message: Message) -> None:
        record = message.record
        if isinstance(record, RetiredGroup) and record.reason in _NEVER_SCORED:
            self._forget(record.group_id)

    def _taken(self, scored: ScoredGroup) -> ScoredRecords:
        records = ScoredRecords(
            scored=scored,
            episodes=self._episodes.get(scored.group_id, {}),
            grades=self._grades.get(scored.group_id, {}),
            completions=self._completions.get(scored.group_id, {}),
        )
        self._forget(scored.group_id)
        return records

    def _forget(self, group_id: str) -> None:
        for request_id in self._completions.pop(group_id, {}):
            self._ledger.forget(request_id)
        self._episodes.pop(group_id, None)
        self._grades.pop(group_id, None)
        self._over.add(group_id)


class _Feed:
    """One partition of a topic, read forward to where it ended when the feed was made."""

    def __init__(self, records: AsyncIterator[list[Message]]) -> None:
        self._batches = records
        self._waiting: list[Message] = []
        self._is_over = False
        self.offset = -1

    @classmethod
    async def of(cls, log: Log, topic: Topic, partition: int) -> "_Feed":
        place = Place(topic.name, partition)
        starts = await log.first_positions([place])
        ends = await log.end_positions([place])
        return cls(_decoded(log, place, start=starts[place], end=ends[place]))

    async def messages(self) -> AsyncIterator[Message]:
        while (message := await self._next()) is not None:
            yield message

    async def read(self, take: Callable[[Message], None], *, until: Callable[[], bool]) -> None:
        """Take messages until this is so, or there are no more."""
        while not until() and (message := await self._next()) is not None:
            take(message)

    async def read_before(self, timestamp_ms: int, take: Callable[[Message], None]) -> None:
        """Take the messages up to the first that is not older than this."""
        while await self._has_next() and self._waiting[-1].timestamp_ms < timestamp_ms:
            take(self._waiting.pop())

    async def _next(self) -> Message | None:
        if not await self._has_next():
            return None
        message = self._waiting.pop()
        self.offset = message.offset
        return message

    async def _has_next(self) -> bool:
        while not self._waiting and not self._is_over:
            batch = await anext(self._batches, None)
            self._is_over = batch is None
            self._waiting = list(reversed(batch or []))
        return bool(self._waiting)

    async def close(self) -> None:
        await self._batches.aclose()  # type: ignore[attr-defined]  # it is a generator


async def _decoded(log: Log, place: Place, *, start: int, end: int) -> AsyncIterator[list[Message]]:
    """Batches below `end`; a record that does not decode is left to its own reader."""
    async for records in read_from(log, {place: start}, ends={place: end}):
        yield list(messages_of(record for record in records if record.offset < end))
