"""Lets a service wait while its blob store does not answer, as it waits for its broker."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError, LostBlobError
from forgemq_contracts.fields import BlobReference
from forgemq_telemetry.telemetry import Telemetry

Result = TypeVar("Result")

PATIENCE_S = 30.0
"""As long as a call to the broker is tried; an outage that is longer ends the process."""

_RETRY_S = 0.5
"""Between two tries: an object store's own client has repeated its request by then."""


async def patiently(call: Callable[[], Awaitable[Result]], *, telemetry: Telemetry) -> Result:
    """What the call returns, which is repeated while the blob store does not answer.

    Args:
        call: Reads a blob, or writes in one call: a write sends nothing to the broker before its
            values are in the blob store.
        telemetry: Gets one event, `blob_store_silent`, for each time that it is waited for.

    Raises:
        BlobError: the store has not answered for `PATIENCE_S`, or the blob is lost.
    """
    now_s = asyncio.get_running_loop().time
    until_s: float | None = None
    while True:
        try:
            return await call()
        except LostBlobError:
            raise
        except BlobError as error:
            if until_s is None:
                until_s = now_s() + PATIENCE_S
                telemetry.event("blob_store_silent", error=str(error), limit_s=PATIENCE_S)
            elif now_s() >= until_s:
                raise
        await asyncio.sleep(_RETRY_S)


class PatientBlobStore(BlobStore):
    """The blobs of a run; a read waits while the store does not answer, also at a start.

    After a wait in vain reads have one try each until the store answers: a view of a run goes on
    without what it cannot read, and would wait again for each record. A write has one try: only its
    caller knows whether somebody waits for it, and whether writing is to be repeated (`patiently`).
    """

    def __init__(
        self, uri: str, *, run: str, telemetry: Telemetry, has_folder: bool = False
    ) -> None:
        """A store at an fsspec address.

        Args:
            uri: As of `BlobStore`.
            run: As of `BlobStore`.
            telemetry: As of `patiently`.
            has_folder: As of `BlobStore`.
        """
        super().__init__(uri, run=run, has_folder=has_folder)
        self._telemetry = telemetry
        self._is_given_up = False

    async def get(self, reference: BlobReference) -> bytes:
        """The bytes, verified against their sha256.

        Raises:
            LostBlobError: they are gone, or not the bytes that were written.
            BlobError: the store has not answered for `PATIENCE_S`, or after such a wait not now.
        """
        read = super().get
        try:
            if self._is_given_up:
                data = await read(reference)
            else:
                data = await patiently(lambda: read(reference), telemetry=self._telemetry)
        except BlobError as error:
            self._is_given_up = not isinstance(error, LostBlobError)
            raise
        self._is_given_up = False
        return data
