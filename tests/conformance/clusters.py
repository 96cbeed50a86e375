"""The two clusters of the suite: one in memory, and a real broker."""

from collections.abc import Sequence
from typing import Protocol

from aiokafka import AIOKafkaProducer

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Emit, Log
from forgemq_bus.memory import MemoryLog

INLINE_BYTES_MAX = 2_000


class Cluster(Protocol):
    """The operations that the suite needs beyond a `Log`.

    Attributes:
        quiet_s: Within this time a record that must not come would have come.
    """

    quiet_s: float

    def process(self, *, has_blobs: bool = True, instance: str = "") -> Log:
        """Open another handle of the same run, as another process has."""
        ...

    async def leave_open(self, transactional_id: str, outputs: Sequence[Emit]) -> None:
        """Write in a transaction and end before its commit, as a killed process."""
        ...

    async def abort(self, transactional_id: str, outputs: Sequence[Emit]) -> None:
        """Write in a transaction and abort it."""
        ...

    async def close(self) -> None: ...


class MemoryCluster:
    quiet_s = 0.05

    def __init__(self, blobs: BlobStore) -> None:
        self._log = MemoryLog(run="r", blobs=blobs, inline_bytes_max=INLINE_BYTES_MAX)
        self._opened = [self._log]

    def process(self, *, has_blobs: bool = True, instance: str = "") -> Log:
        log = self._log.open(has_blobs=has_blobs, instance=instance)
        self._opened.append(log)
        return log

    async def leave_open(self, transactional_id: str, outputs: Sequence[Emit]) -> None:
        writer = await self._log.transaction_writer(transactional_id)
        await writer.abandon(outputs=outputs)

    async def abort(self, transactional_id: str, outputs: Sequence[Emit]) -> None:
        writer = await self._log.transaction_writer(transactional_id)
        await writer.abort(outputs=outputs)

    async def close(self) -> None:
        for log in self._opened:
            await log.close()


class KafkaCluster:
    quiet_s = 0.6

    def __init__(self, bootstrap: str, run: str, blobs: BlobStore) -> None:
        self._bootstrap = bootstrap
        self._run = run
        self._blobs = blobs
        self._opened: list[KafkaLog] = []
        self._producers: list[AIOKafkaProducer] = []

    def process(self, *, has_blobs: bool = True, instance: str = "") -> Log:
        log = KafkaLog(
            KafkaConnection(bootstrap=self._bootstrap),
            run=self._run,
            blobs=self._blobs if has_blobs else None,
            inline_bytes_max=INLINE_BYTES_MAX,
            instance=instance,
        )
        self._opened.append(log)
        return log

    async def leave_open(self, transactional_id: str, outputs: Sequence[Emit]) -> None:
        await self._written(transactional_id, outputs)

    async def abort(self, transactional_id: str, outputs: Sequence[Emit]) -> None:
        producer = await self._written(transactional_id, outputs)
        await producer.abort_transaction()

    async def _written(self, transactional_id: str, outputs: Sequence[Emit]) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap, transactional_id=f"{self._run}.{transactional_id}"
        )
        self._producers.append(producer)
        await producer.start()
        await producer.begin_transaction()
        for emit in outputs:
            await producer.send_and_wait(
                f"{self._run}.{emit.topic}", emit.value, key=emit.key, partition=emit.partition
            )
        return producer

    async def close(self) -> None:
        for log in self._opened:
            await log.close()
        for producer in self._producers:
            await producer.stop()
