"""Large values in the blob store: compressed there, the same bytes for every reader."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forgemq_bus.blobs import PUT_AGE_S_MAX, BlobStore
from forgemq_bus.errors import BlobError
from forgemq_bus.log import Emit, Place, Record
from forgemq_bus.memory import MemoryLog
from forgemq_bus.payloads import (
    BLOB_HEADER,
    CODEC_HEADER,
    LEAVE_IN_STORE,
    fetch_from,
    fetched,
    offloaded,
)
from forgemq_contracts.fields import BlobReference

TRACE = ("traceparent", b"00-1")


def emit(value: bytes) -> Emit:
    return Emit(topic="t", partition=0, key=b"k", value=value, headers=(TRACE,))


def record(sent: Emit) -> Record:
    return Record(
        topic=sent.topic,
        partition=sent.partition,
        offset=7,
        timestamp_ms=0,
        key=sent.key,
        value=sent.value,
        headers=sent.headers,
    )


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> BlobStore:
    return BlobStore(str(tmp_path_factory.mktemp("blobs")), run="r")


@given(value=st.binary(max_size=200))
async def test_every_value_comes_back_as_it_was_with_its_own_headers_alone(
    blobs: BlobStore, value: bytes
) -> None:
    (sent,) = await offloaded([emit(value)], blobs=blobs, inline_bytes_max=100)
    (got,) = await fetched([record(sent)], blobs=blobs)
    assert (sent.value == b"") == (len(value) > 100 or not value)
    assert (got.value, got.headers) == (value, (TRACE,))


class SlowStore(BlobStore):
    """A store whose first put takes this long, as for a process that stands still."""

    def __init__(self, folder: Path, *, pause_s: float) -> None:
        super().__init__(str(folder), run="r", clock_s=lambda: self.at_s)
        self.at_s, self.pause_s = 0.0, pause_s

    async def put(self, data: bytes) -> BlobReference:
        reference = await super().put(data)
        self.at_s, self.pause_s = self.at_s + self.pause_s, 0.0
        return reference


@pytest.mark.parametrize("is_transaction", [False, True])
async def test_a_writer_that_stood_still_behind_its_blob_writes_no_record_of_it(
    tmp_path: Path, is_transaction: bool
) -> None:
    log = MemoryLog(
        run="r", blobs=SlowStore(tmp_path, pause_s=PUT_AGE_S_MAX + 1), inline_bytes_max=100
    )
    await log.create_topics({"t": 1})
    place = Place("t", 0)

    async def write() -> None:
        if is_transaction:
            writer = await log.transaction_writer("w")
            await writer.commit(outputs=[emit(bytes(101))], group="g", positions={place: 0})
        else:
            await (await log.writer()).write(emit(bytes(101)))

    with pytest.raises(BlobError, match="was put 601 s ago"):
        await write()
    ends = await log.end_positions([place], isolation="uncommitted")
    assert ends == {place: 0}
    await write()
    reader = await log.reader({place: 0})
    [found] = await reader.read(timeout_s=0, records_max=1)
    await log.close()
    assert found.value == bytes(101)


async def test_a_slow_store_may_take_minutes(tmp_path: Path) -> None:
    store = SlowStore(tmp_path, pause_s=PUT_AGE_S_MAX - 60)
    [sent] = await offloaded([emit(bytes(101))], blobs=store, inline_bytes_max=100)
    [got] = await fetched([record(sent)], blobs=store)
    assert got.value == bytes(101)


async def test_the_blob_of_a_message_history_takes_a_fraction_of_its_size(blobs: BlobStore) -> None:
    value = b"".join((n * n % 701).to_bytes(4, "little") for n in range(50_000))
    (sent,) = await offloaded([emit(value)], blobs=blobs, inline_bytes_max=100)
    reference = msgspec.msgpack.decode(dict(sent.headers)[BLOB_HEADER], type=BlobReference)
    assert reference.size_bytes < len(value) // 4


async def test_a_blob_from_before_compression_is_read_as_it_is(blobs: BlobStore) -> None:
    reference = await blobs.put(b"plain")
    header = (BLOB_HEADER, msgspec.msgpack.encode(reference))
    (got,) = await fetched([record(replace(emit(b""), headers=(header,)))], blobs=blobs)
    assert (got.value, got.headers) == (b"plain", ())


async def test_a_value_that_a_newer_writer_compressed_is_an_error_that_names_the_record(
    blobs: BlobStore,
) -> None:
    reference = await blobs.put(b"no frame")
    headers = ((BLOB_HEADER, msgspec.msgpack.encode(reference)), (CODEC_HEADER, b"lzma"))
    with pytest.raises(BlobError, match=r"t/0@7: .*which this reader"):
        await fetched([record(replace(emit(b""), headers=headers))], blobs=blobs)


async def test_a_lost_value_is_a_record_without_one_that_says_why(blobs: BlobStore) -> None:
    (good,) = await offloaded([emit(b"good" * 99)], blobs=blobs, inline_bytes_max=100)
    nowhere = BlobReference(uri="nowhere", sha256="0" * 64, size_bytes=0)
    no_frame = await blobs.put(b"no frame")
    codec = (CODEC_HEADER, b"zstd")
    lost = {
        "names no blob": ((BLOB_HEADER, msgspec.msgpack.encode(nowhere)), codec),
        "its header": ((BLOB_HEADER, b"\xc1"),),
        "not decompress": (
            (BLOB_HEADER, msgspec.msgpack.encode(no_frame)),
            (CODEC_HEADER, b"zstd"),
        ),
    }
    sent = [good, *(replace(emit(b""), headers=(TRACE, *one)) for one in lost.values())]
    got = await fetched([record(one) for one in sent], blobs=blobs)
    assert [one.value for one in got] == [b"good" * 99, b"", b"", b""]
    assert [one.headers for one in got] == [(TRACE,)] * 4
    assert got[0].lost == ""
    for one, why in zip(got[1:], lost, strict=True):
        assert one.lost.startswith("the value is lost: ")
        assert why in one.lost


async def test_a_reference_says_how_large_its_value_is(blobs: BlobStore) -> None:
    sent = await offloaded([emit(bytes(5_000)), emit(b"abc")], blobs=blobs, inline_bytes_max=100)
    values = fetch_from(blobs)
    assert [values.size_bytes(record(one)) for one in sent] == [5_000, 3]
    assert [LEAVE_IN_STORE.size_bytes(record(one)) for one in sent] == [0, 3]


def test_what_fits_is_a_beginning_and_at_least_one() -> None:
    records = [record(emit(bytes(size))) for size in (60, 30, 20, 5)]
    sizes = {limit: len(LEAVE_IN_STORE.fitting(records, limit)) for limit in (1, 89, 90, 114, 115)}
    assert sizes == {1: 1, 89: 1, 90: 2, 114: 3, 115: 4}
    assert LEAVE_IN_STORE.fitting([], 10) == []
