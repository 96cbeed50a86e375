"""Moves values above the inline limit, compressed, to the blob store and back.

The record keeps a reference in a header. Both logs use these two functions, so the headers are not
visible outside the bus.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import cramjam
import msgspec

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError, RecordTooLargeError
from forgemq_bus.log import Emit, Record
from forgemq_contracts.fields import BlobReference

BLOB_HEADER = "blob"
CODEC_HEADER = "blob-codec"
ZSTD = b"zstd"
ZSTD_LEVEL = 1  # A long message history: 8 ms, to a fifth of its size; level 3 gains 2 % more.
BLOBS_AT_ONCE_MAX = 8  # Of one read or commit: bounds its memory and threads.


async def offloaded(
    emits: Sequence[Emit], *, blobs: BlobStore | None, inline_bytes_max: int
) -> list[Emit]:
    """Move values above the limit to the blob store; returns the records with b"" for them.

    Raises:
        RecordTooLargeError: a value is above the limit and there is no blob store.
    """
    if all(len(emit.value) <= inline_bytes_max for emit in emits):
        return list(emits)
    gate = asyncio.Semaphore(BLOBS_AT_ONCE_MAX)

    async def one(emit: Emit) -> Emit:
        if len(emit.value) <= inline_bytes_max:
            return emit
        if blobs is None:
            raise RecordTooLargeError(
                f"{emit.topic}/{emit.partition}: a value of {len(emit.value)} bytes is above the "
                f"inline limit of {inline_bytes_max} and this log has no blob store"
            )
        async with gate:
            reference = await blobs.put(await asyncio.to_thread(_compressed, emit.value))
        headers = ((BLOB_HEADER, msgspec.msgpack.encode(reference)), (CODEC_HEADER, ZSTD))
        return replace(emit, value=b"", headers=emit.headers + headers)

    return list(await asyncio.gather(*map(one, emits)))


async def fetched(records: Sequence[Record], *, blobs: BlobStore | None) -> list[Record]:
    """Fetch the blobs; returns the records with their values, and without the blob headers.

    Raises:
        LostBlobError: the blob is missing or damaged; names the record.
        BlobError: the store does not answer, or this log has none.
    """
    if not any(name == BLOB_HEADER for record in records for name, _ in record.headers):
        return list(records)
    gate = asyncio.Semaphore(BLOBS_AT_ONCE_MAX)

    async def one(record: Record) -> Record:
        named = dict(record.headers)
        encoded, codec = named.get(BLOB_HEADER), named.get(CODEC_HEADER, b"")
        if encoded is None:
            return record
        position = f"{record.topic}/{record.partition}@{record.offset}"
        if blobs is None:
            raise BlobError(f"{position} points at a blob and this log has no blob store")
        reference = msgspec.msgpack.decode(encoded, type=BlobReference)
        try:
            async with gate:
                stored = await blobs.get(reference)
                value = await asyncio.to_thread(_plain, stored, codec)
        except BlobError as error:
            raise type(error)(f"{position}: {error}") from error
        headers = tuple(h for h in record.headers if h[0] not in (BLOB_HEADER, CODEC_HEADER))
        return replace(record, value=value, headers=headers)

    return list(await asyncio.gather(*map(one, records)))


Values: TypeAlias = Callable[[Sequence[Record]], Awaitable[list[Record]]]
"""What a reader does about values in the blob store before it returns records."""


def fetch_from(blobs: BlobStore | None) -> Values:
    """Fetch every value that lies in the blob store."""

    async def values(records: Sequence[Record]) -> list[Record]:
        return await fetched(records, blobs=blobs)

    return values


async def leave_in_store(records: Sequence[Record]) -> list[Record]:
    """The records as they lie on the log."""
    return list(records)


def reference_of(record: Record) -> BlobReference | None:
    """Where the value of a record read without values lies; None if it lies in the record."""
    encoded = dict(record.headers).get(BLOB_HEADER)
    return None if encoded is None else msgspec.msgpack.decode(encoded, type=BlobReference)


def _compressed(value: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(value, level=ZSTD_LEVEL))


def _plain(stored: bytes, codec: bytes) -> bytes:
    if not codec:
        return stored
    if codec != ZSTD:
        raise BlobError(f"compressed with {codec!r}, which this reader does not know")
    try:
        return bytes(cramjam.zstd.decompress(stored))
    except cramjam.DecompressionError as error:
        raise BlobError(f"does not decompress: {error}") from error
