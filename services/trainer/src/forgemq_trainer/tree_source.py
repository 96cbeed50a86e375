"""Reads merged-trees as steps need them, and knows the offsets from which a restart has to read."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from forgemq_bus.decoding import decoded_record
from forgemq_bus.errors import BlobError
from forgemq_bus.log import Log, Place, Reader, Record, Writer
from forgemq_contracts.steps import ScheduledStep
from forgemq_contracts.topics import MERGED_TREES
from forgemq_contracts.trees import MergedTree
from forgemq_shell.dead_letters import DeadLetters
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.core.store_patience import StorePatience

READ_TIMEOUT_S = 0.2
"""A read returns this late if nothing arrives; then the condition for a lost tree is checked."""

RECORDS_MAX = 64
"""Trees of one read, which is usually those of a step; large ones are in blobs."""

WAITING_EVENT_S = 10.0
"""Between two events about a wait for trees: a producer's open transaction may hold back readers
for up to 10 s, which needs no event."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    place: Place
    offset: int
    value: bytes
    version_min: int


class TreeSource:
    """Trees that were read and are not yet trained.

    A tree is dropped when its group was in a trained step, or when it is too stale for any later
    step. `positions` are the oldest offsets still needed, so a restart reads every tree it needs.
    """

    def __init__(
        self,
        log: Log,
        reader: Reader,
        writer: Writer,
        places: Iterable[Place],
        telemetry: Telemetry,
    ) -> None:
        self._log = log
        self._reader = reader
        self._writer = writer
        self._dead_letters = DeadLetters(log, writer, service="trainer", telemetry=telemetry)
        self._places = tuple(places)
        self._telemetry = telemetry
        self._waiting: dict[str, _Waiting] = {}
        self._patience = StorePatience()

    @classmethod
    async def open(
        cls, log: Log, *, partitions: int, since: Mapping[int, int], telemetry: Telemetry
    ) -> "TreeSource":
        """Read from these offsets by partition, or from the first record that the log still has."""
        places = [Place(MERGED_TREES.name, number) for number in range(partitions)]
        first = await log.first_positions(places)
        start = {place: max(first[place], since.get(place.partition, 0)) for place in places}
        return cls(log, await log.reader(start), await log.writer(), places, telemetry)

    async def collect(self, scheduled: ScheduledStep) -> dict[str, bytes]:
        """Wait for the step's trees; returns their wire bytes by group id, without lost ones.

        A tree was written before its step was scheduled. So it is lost if it has not been found
        once everything in its partition has been read. A slow broker fails no group.

        Raises:
            BlobError: the blob store has been away for too long; that fails no group.
        """
        wanted = {group.group_id: group.partition for group in scheduled.groups}
        places = [Place(MERGED_TREES.name, partition) for partition in {*wanted.values()}]
        # The uncommitted end: while commit markers are written, the committed end may still lie
        # before a tree whose transaction has been committed.
        ends = await self._log.end_positions(places, isolation="uncommitted")
        loop = asyncio.get_running_loop()
        event_s = loop.time() + WAITING_EVENT_S
        while any(
            group not in self._waiting and self._reader.position(place) < ends[place]
            for group, place in ((g, Place(MERGED_TREES.name, p)) for g, p in wanted.items())
        ):
            for record in await self._read():
                await self._keep(record)
            if loop.time() >= event_s:
                self._telemetry.event("waiting_for_trees", step=scheduled.step)
                event_s = loop.time() + WAITING_EVENT_S
        return {group: self._waiting[group].value for group in wanted if group in self._waiting}

    def forget(self, group_ids: Iterable[str], *, version_min: int) -> None:
        """Drop these groups, and all groups whose oldest entry is below `version_min`."""
        for group in group_ids:
            self._waiting.pop(group, None)
        for group, tree in list(self._waiting.items()):
            if tree.version_min < version_min:
                del self._waiting[group]

    def positions(self) -> tuple[tuple[int, int], ...]:
        """(partition, offset) from which a restart has to read."""
        oldest = {place: self._reader.position(place) for place in self._places}
        for tree in self._waiting.values():
            oldest[tree.place] = min(oldest[tree.place], tree.offset)
        return tuple((place.partition, offset) for place, offset in sorted(oldest.items()))

    async def close(self) -> None:
        """Release the connections."""
        await self._reader.close()
        await self._writer.close()

    async def _read(self) -> list[Record]:
        try:
            records = await self._reader.read(timeout_s=READ_TIMEOUT_S, records_max=RECORDS_MAX)
        except BlobError as error:
            delay_s = self._patience.delay_s(now_s=asyncio.get_running_loop().time())
            if delay_s is None:
                raise
            self._telemetry.event("blob_unreadable", error=str(error))
            await asyncio.sleep(delay_s)
            return []
        self._patience.answered()
        return records

    async def _keep(self, record: Record) -> None:
        try:
            tree = decoded_record(record)
        except msgspec.ValidationError as error:
            await self._dead_letters.write(record, f"does not decode: {error}")
            return
        assert isinstance(tree, MergedTree)
        # Truncated to whole values: a damaged array must not raise here, but fail its group later.
        versions = np.frombuffer(tree.entry_version[: len(tree.entry_version) // 4 * 4], "<i4")
        self._waiting[tree.group_id] = _Waiting(
            record.place, record.offset, record.value, int(versions.min()) if len(versions) else 0
        )
