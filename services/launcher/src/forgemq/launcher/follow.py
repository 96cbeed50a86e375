"""Reads a run's topics into its live state; the panel and the report show what is here."""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Iterable

import msgspec

from forgemq.bus.log import Log, Place, Reader, Record
from forgemq.contracts.completions import FinishedCompletion
from forgemq.contracts.episodes import FinishedEpisode
from forgemq.contracts.groups import ScoredGroup
from forgemq.contracts.messages import Message
from forgemq.contracts.run import RunConfiguration, StartedRun
from forgemq.contracts.topics import (
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    MERGED_TREES,
    SCORED_GROUPS,
)
from forgemq.contracts.trees import MergedTree
from forgemq.run_view import audit, view
from forgemq.run_view.audit import Ledger
from forgemq.run_view.reading import message_of, places_of, read_all
from forgemq.run_view.samples import TreeFacts, first_ends, tree_facts
from forgemq.run_view.trajectory import chosen
from forgemq.run_view.view import RunView

BAD_RECORDS_KEPT_MAX = 100
_READ_S = 0.25
_RECORDS_MAX = 2000
TREE_TOPICS = (FINISHED_COMPLETIONS, FINISHED_EPISODES, SCORED_GROUPS, MERGED_TREES)
"""What a tree is compared with; one partition of them has all of a group."""


class Follower:
    """Follows a run from its first record on.

    Lifecycle: one task runs `follow` until cancelled; `view` and `ledger` may be read between
    its awaits. Records that do not decode are counted and skipped: their readers dead-letter them.
    """

    def __init__(self, log: Log, started: StartedRun) -> None:
        self._log = log
        self._configuration = started.configuration
        self.view = RunView(started)
        self.ledger = Ledger(started.configuration)
        self.bad_records: deque[str] = deque(maxlen=BAD_RECORDS_KEPT_MAX)

    async def follow(self) -> None:
        """Apply every record, old and new; runs until cancelled."""
        reader = await self._reader()
        try:
            while True:
                self._apply(await reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX))
        finally:
            await reader.close()

    async def catch_up(self) -> None:
        """Apply every record that is on the log now, from the first; for a run that stands."""
        async for records in read_all(self._log, self._places()):
            self._apply(records)

    async def _reader(self) -> Reader:
        return await self._log.reader(await self._log.first_positions(self._places()))

    def _places(self) -> list[Place]:
        wanted = {topic.name: topic for topic in (*view.TOPICS, *audit.TOPICS)}
        return [p for topic in wanted.values() for p in places_of(topic, self._configuration)]

    def _apply(self, records: Iterable[Record]) -> None:
        for record in records:
            try:
                message = message_of(record)
            except msgspec.MsgspecError as error:
                self.bad_records.append(
                    f"{record.topic}/{record.partition}@{record.offset}: {error}"
                )
                continue
            self.view.apply(message)
            self.ledger.apply(message)


async def trees(log: Log, configuration: RunConfiguration) -> AsyncIterator[TreeFacts]:
    """The facts of every tree on the log, one group partition in memory at a time."""
    for partition in range(configuration.log.group_partitions):
        facts = await _trees_of(log, partition)
        for each in facts:
            yield each


async def _trees_of(log: Log, partition: int) -> list[TreeFacts]:
    completions: dict[str, list[Message]] = {}
    scored: dict[str, ScoredGroup] = {}
    ends: dict[str, list[Message]] = {}
    found: list[tuple[MergedTree, str]] = []
    places = [Place(topic.name, partition) for topic in TREE_TOPICS]
    async for records in read_all(log, places):
        for record in records:
            try:
                message = message_of(record)
            except msgspec.MsgspecError:
                continue
            match message.record:
                case FinishedCompletion() as each:
                    completions.setdefault(each.group_id, []).append(message)
                case FinishedEpisode() as each:
                    ends.setdefault(each.group_id, []).append(message)
                case ScoredGroup() as each:
                    scored[each.group_id] = each
                case MergedTree() as each:
                    found.append((each, hashlib.sha256(record.value).hexdigest()))
                case _:
                    pass
        # Unpacking trees is arithmetic of milliseconds each; others get their turn in between.
        await asyncio.sleep(0)
    return [
        tree_facts(
            tree,
            sha256=sha256,
            completions=chosen(completions.get(tree.group_id, ())),
            scored=scored.get(tree.group_id),
            ends=first_ends(ends.get(tree.group_id, ())),
        )
        for tree, sha256 in found
    ]
