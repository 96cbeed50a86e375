"""Opens the log of one run on a broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_contracts.run import RunConfiguration


@asynccontextmanager
async def open_run_log(
    connection: KafkaConnection, configuration: RunConfiguration, *, blobs: str
) -> AsyncIterator[KafkaLog]:
    """The log of a run with its blob store; closed at the end of the block."""
    log = KafkaLog(
        connection,
        run=configuration.run,
        blobs=BlobStore(blobs, run=configuration.run),
        inline_bytes_max=configuration.log.inline_bytes_max,
    )
    try:
        yield log
    finally:
        await log.close()
