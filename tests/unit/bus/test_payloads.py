"""Large values in the blob store: compressed there, the same bytes for every reader."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError
from forgemq_bus.log import Emit, Record
from forgemq_bus.payloads import BLOB_HEADER, CODEC_HEADER, fetched, offloaded
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


@pytest.mark.parametrize(
    ("codec", "error"), [(b"zstd", "does not decompress"), (b"lzma", "which this reader")]
)
async def test_what_cannot_be_decompressed_is_a_blob_error_that_names_the_record(
    blobs: BlobStore, codec: bytes, error: str
) -> None:
    reference = await blobs.put(b"no frame")
    headers = ((BLOB_HEADER, msgspec.msgpack.encode(reference)), (CODEC_HEADER, codec))
    with pytest.raises(BlobError, match=f"t/0@7: .*{error}"):
        await fetched([record(replace(emit(b""), headers=headers))], blobs=blobs)
