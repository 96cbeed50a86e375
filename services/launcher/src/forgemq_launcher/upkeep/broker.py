"""The run's broker: its own Apache Kafka node in the run's folder, or the one a setting names."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from forgemq_bus.broker import BrokerError, LocalBroker
from forgemq_bus.kafka import KafkaConnection
from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.upkeep.supervisor import Note
from forgemq_shell.connection import kafka_connection

WATCH_EVERY_S = 1.0


class RunBroker:
    """Lifecycle: `start`, use `connection`, `stop`; a broker that a setting names is left alone."""

    def __init__(self, folder: Path, *, environ: Mapping[str, str], note: Note) -> None:
        self._environ = environ
        is_named = bool(environ.get("FORGEMQ_KAFKA"))
        self._own = None if is_named else LocalBroker(folder, progress=note)
        self._connection: KafkaConnection | None = None
        self._starting: asyncio.Future[str] | None = None

    @property
    def is_own(self) -> bool:
        """Whether it belongs to the run."""
        return self._own is not None

    @property
    def connection(self) -> KafkaConnection:
        """How to reach it; after `start` only."""
        assert self._connection is not None, "start comes first"
        return self._connection

    async def start(self, *, stop: asyncio.Event | None = None) -> bool:
        """Have a broker; the first start of all also downloads the jars of Kafka.

        Returns:
            Whether there is one; False where `stop` was set first. `stop()` then ends the start.
        """
        if self._own is None:
            self._connection = kafka_connection(self._environ)
            return True
        # Not cancelled with us: a start that breaks off halfway would leave a process behind.
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._own.start))
        stopping = asyncio.ensure_future((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait([self._starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not self._starting.done():
            return False
        self._connection = KafkaConnection(bootstrap=self._starting.result())
        return True

    async def keep(self, *, policy: RestartPolicy, note: Note) -> None:
        """Start the run's own broker again when it dies, at its old address; until cancelled.

        Raises:
            BrokerError: it died too often.
        """
        exits_s: list[float] = []
        while self._own is not None:
            while self._own.is_running():  # noqa: ASYNC110 - a process has no event to wait for
                await asyncio.sleep(WATCH_EVERY_S)
            exits_s.append(time.monotonic())
            delay_s = policy.delay_s(exits_s)
            if delay_s is None:
                raise BrokerError(f"Kafka died {len(exits_s)} times; see {self._own.log_file}")
            note(f"Kafka died; restarting in {delay_s:.1f} s ({self._own.log_file})")
            await asyncio.sleep(delay_s)
            await asyncio.to_thread(self._own.stop)  # forgets the dead process
            self._starting = asyncio.ensure_future(asyncio.to_thread(self._own.start))
            await asyncio.shield(self._starting)

    async def stop(self) -> None:
        """Stop the run's own broker, with a clean shutdown of its log; idempotent."""
        if self._own is None:
            return
        if self._starting is not None:
            self._own.abandon()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.to_thread(self._own.stop)
