"""Reading on although the blobs of some records are lost."""

from pathlib import Path

import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError
from forgemq_bus.kept_records import read_from
from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts.fields import BlobReference

A, B = Place("a", 0), Place("a", 1)
VALUES = {(place, number): b"%d" % number * 200 for place in (A, B) for number in range(6)}


class HoledStore(BlobStore):
    """Some of its blobs are gone; or it does not answer at all."""

    lost: frozenset[str] = frozenset()
    is_away = False

    async def get(self, reference: BlobReference) -> bytes:
        if self.is_away:
            raise BlobError("no answer")
        if reference.sha256 in self.lost:
            return await super().get(BlobReference(uri="nowhere", sha256="0" * 64, size_bytes=0))
        return await super().get(reference)


async def filled(folder: Path, *, lost: set[tuple[Place, int]]) -> tuple[MemoryLog, HoledStore]:
    store = HoledStore(str(folder), run="r")
    log = MemoryLog(run="r", blobs=store, inline_bytes_max=100)
    await log.create_topics({"a": 2})
    writer = await log.writer()
    for (place, number), value in VALUES.items():
        # Its own first byte for each partition: else both partitions point at one blob.
        whole = bytes([place.partition]) + value
        before = await names(store)
        await writer.write(Emit(topic="a", partition=place.partition, key=b"", value=whole))
        if (place, number) in lost:
            store.lost |= await names(store) - before
    return log, store


async def names(store: BlobStore) -> set[str]:
    minutes = await store.list_minutes()
    return {file.name for minute in minutes for file in await store.list_blobs(minute)}


@pytest.mark.parametrize(
    "lost",
    [
        {(A, 0)},
        {(A, 5)},
        {(A, 2), (A, 3), (B, 0), (B, 5)},
        set(VALUES),
    ],
)
async def test_all_but_the_lost_values_are_read_each_once(tmp_path: Path, lost):
    log, _ = await filled(tmp_path, lost=lost)
    found = [r async for records in read_from(log, {A: 0, B: 0}) for r in records]
    places = [(record.place, record.offset) for record in found]
    assert sorted(places) == sorted(VALUES.keys() - lost)
    assert all(record.value[1:] == VALUES[record.place, record.offset] for record in found)


async def test_a_store_that_does_not_answer_loses_nothing(tmp_path: Path):
    log, store = await filled(tmp_path, lost=set())
    store.is_away = True
    with pytest.raises(BlobError, match="no answer"):
        await anext(read_from(log, {A: 0, B: 0}))
    store.is_away = False
    found = [r async for records in read_from(log, {A: 0, B: 0}) for r in records]
    assert len(found) == len(VALUES)
