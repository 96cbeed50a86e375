"""Moves values above the inline limit, compressed, to the blob store and back.

The record keeps a reference in a header. Both logs use these two functions, so the headers are not
visible outside the bus.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import cramjam
import msgspec
from msgspec.structs import replace

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError, LostBlobError, RecordTooLargeError
from forgemq_bus.log import Emit, Record
from forgemq_contracts.fields import BlobReference

BLOB_HEADER = "blob"
CODEC_HEADER = "blob-codec"
BLOB_HEADERS = (BLOB_HEADER, CODEC_HEADER)
"""Headers of a record whose value lies in the blob store."""
ZSTD = b"zstd"
ZSTD_LEVEL = 1  # A long message history: 8 ms, to a fifth of its size; level 3 gains 2 % more.
BLOBS_AT_ONCE_MAX = 8  # Of one read or commit: bounds its memory and threads.


async def offloaded(
    emits: Sequence[Emit], *, blobs: BlobStore | None, inline_bytes_max: int
) -> list[Emit]:
    """Move values above the limit to the blob store; returns the records with b"" for them.

    Send them at once: a sweep deletes blobs that have no record for long.

    Raises:
        BlobError: the store refuses or does not answer, or the first blobs are too old already.
        RecordTooLargeError: a value is above the limit and there is no blob store.
    """
    for emit in emits:  # A loop: a generator costs more than to look at one record.
        if len(emit.value) > inline_bytes_max:
            break
    else:
        return list(emits)
    gate = asyncio.Semaphore(BLOBS_AT_ONCE_MAX)

    put: list[BlobReference] = []

    async def one(emit: Emit) -> Emit:
        if len(emit.value) <= inline_bytes_max:
            return emit
        if blobs is None:
            raise RecordTooLargeError(
                f"{emit.place}: a value of {len(emit.value)} bytes is above the "
                f"inline limit of {inline_bytes_max} and this log has no blob store"
            )
        async with gate:
            reference = await blobs.put(await asyncio.to_thread(_compressed, emit.value))
        put.append(reference)
        reference = replace(reference, value_bytes=len(emit.value))
        headers = ((BLOB_HEADER, msgspec.msgpack.encode(reference)), (CODEC_HEADER, ZSTD))
        return replace(emit, value=b"", headers=emit.headers + headers)

    ready = list(await asyncio.gather(*map(one, emits)))
    if blobs is not None:
        for reference in put:
            blobs.check_fresh(reference)
    return ready


async def fetched(records: Sequence[Record], *, blobs: BlobStore | None) -> list[Record]:
    """Fetch the blobs; returns the records with their values, and without the blob headers.

    A record whose blob is lost comes without a value and says so: see `Record.lost`.

    Raises:
        BlobError: the store does not answer, or this log has none.
    """
    # A list, for the same reason as in `offloaded`.
    if not any([name == BLOB_HEADER for record in records for name, _ in record.headers]):
        return list(records)
    gate = asyncio.Semaphore(BLOBS_AT_ONCE_MAX)

    async def one(record: Record) -> Record:
        if BLOB_HEADER not in dict(record.headers):
            return record
        headers = tuple(header for header in record.headers if header[0] not in BLOB_HEADERS)
        try:
            async with gate:
                value = await _value(record, blobs=blobs)
        except LostBlobError as error:
            return replace(record, value=b"", headers=headers, lost=f"the value is lost: {error}")
        except BlobError as error:
            raise BlobError(f"{record.where}: {error}") from error
        return replace(record, value=value, headers=headers)

    return list(await asyncio.gather(*map(one, records)))


async def _value(record: Record, *, blobs: BlobStore | None) -> bytes:
    if blobs is None:
        raise BlobError("the value is in a blob and this log has no blob store")
    try:
        reference = reference_of(record)
    except msgspec.MsgspecError as error:
        raise LostBlobError(f"its header names no blob: {error}") from error
    assert reference is not None, "asked for a record that points at a blob"
    stored = await blobs.get(reference)
    return await asyncio.to_thread(_plain, stored, dict(record.headers).get(CODEC_HEADER, b""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What a reader does about values in the blob store before it returns records.

    Attributes:
        fetch: Makes of records as they lie on the log what the reader returns.
        size_bytes: How much memory the value takes that it returns for such a record.
    """

    fetch: Callable[[Sequence[Record]], Awaitable[list[Record]]]
    size_bytes: Callable[[Record], int]

    def fitting(self, records: Sequence[Record], bytes_max: int) -> list[Record]:
        """The first records whose values fit in `bytes_max` together, at least one."""
        size_bytes = 0
        for index, record in enumerate(records):
            size_bytes += self.size_bytes(record)
            if index and size_bytes > bytes_max:
                return list(records[:index])
        return list(records)


def fetch_from(blobs: BlobStore | None) -> Values:
    """Fetch every value that lies in the blob store."""

    async def fetch(records: Sequence[Record]) -> list[Record]:
        return await fetched(records, blobs=blobs)

    return Values(fetch=fetch, size_bytes=value_bytes)


async def _as_is(records: Sequence[Record]) -> list[Record]:
    return list(records)


def _inline_bytes(record: Record) -> int:
    return len(record.value)


LEAVE_IN_STORE = Values(fetch=_as_is, size_bytes=_inline_bytes)
"""The records as they lie on the log."""


def reference_of(record: Record) -> BlobReference | None:
    """Where the value of a record read without values lies; None if it lies in the record."""
    for name, encoded in record.headers:
        if name == BLOB_HEADER:
            return msgspec.msgpack.decode(encoded, type=BlobReference)
    return None


def value_bytes(record: Record) -> int:
    """Size of the value of a record read without values, in the record or in the blob store."""
    try:
        reference = reference_of(record)
    except msgspec.MsgspecError:
        return 0
    if reference is None:
        return len(record.value)
    return reference.value_bytes or reference.size_bytes


def _compressed(value: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(value, level=ZSTD_LEVEL))


def _plain(stored: bytes, codec: bytes) -> bytes:
    if not codec:
        return stored
    if codec != ZSTD:
        # Not lost: a newer reader knows it.
        raise BlobError(f"compressed with {codec!r}, which this reader does not know")
    try:
        return bytes(cramjam.zstd.decompress(stored))
    except cramjam.DecompressionError as error:
        raise LostBlobError(f"does not decompress: {error}") from error
