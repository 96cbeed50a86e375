"""Values above the inline limit go to the blob store; the record keeps a reference.

Both logs use these two functions, so nobody outside the bus ever sees the header.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from forgemq.bus.blobs import BlobStore
from forgemq.bus.errors import BlobError, RecordTooLargeError
from forgemq.bus.log import Emit, Record
from forgemq.contracts.fields import BlobReference

BLOB_HEADER = "blob"
BLOBS_AT_ONCE = 8  # Bounds the memory and the threads that one read or commit takes.


async def offloaded(
    emits: Sequence[Emit], *, blobs: BlobStore | None, inline_bytes_max: int
) -> list[Emit]:
    """The same records; a value above the limit is in the blob store and replaced by b"".

    Raises:
        RecordTooLargeError: a value is above the limit and there is no blob store.
    """
    if all(len(emit.value) <= inline_bytes_max for emit in emits):
        return list(emits)
    gate = asyncio.Semaphore(BLOBS_AT_ONCE)

    async def one(emit: Emit) -> Emit:
        if len(emit.value) <= inline_bytes_max:
            return emit
        if blobs is None:
            raise RecordTooLargeError(
                f"{emit.topic}/{emit.partition}: a value of {len(emit.value)} bytes is above the "
                f"inline limit of {inline_bytes_max} and this log has no blob store"
            )
        async with gate:
            reference = await blobs.put(emit.value)
        header = (BLOB_HEADER, msgspec.msgpack.encode(reference))
        return replace(emit, value=b"", headers=(*emit.headers, header))

    return list(await asyncio.gather(*map(one, emits)))


async def fetched(records: Sequence[Record], *, blobs: BlobStore | None) -> list[Record]:
    """The same records with the values of blobs in place and their header gone.

    Raises:
        LostBlobError: the blob is gone or damaged; says which record.
        BlobError: the store does not answer, or this log has none.
    """
    if not any(name == BLOB_HEADER for record in records for name, _ in record.headers):
        return list(records)
    gate = asyncio.Semaphore(BLOBS_AT_ONCE)

    async def one(record: Record) -> Record:
        encoded = dict(record.headers).get(BLOB_HEADER)
        if encoded is None:
            return record
        where = f"{record.topic}/{record.partition}@{record.offset}"
        if blobs is None:
            raise BlobError(f"{where} points at a blob and this log has no blob store")
        reference = msgspec.msgpack.decode(encoded, type=BlobReference)
        try:
            async with gate:
                value = await blobs.get(reference)
        except BlobError as error:
            raise type(error)(f"{where}: {error}") from error
        headers = tuple(header for header in record.headers if header[0] != BLOB_HEADER)
        return replace(record, value=value, headers=headers)

    return list(await asyncio.gather(*map(one, records)))
