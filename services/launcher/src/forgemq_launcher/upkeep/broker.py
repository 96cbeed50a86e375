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
"""A restart takes seconds anyway; services retry for 30 s meanwhile."""


class RunBroker:
    """The broker of one run; one that FORGEMQ_KAFKA names is never started or stopped.

    Lifecycle: `start`, use `connection`, one task `keep`, `stop`.
    """

    def __init__(self, folder: Path, *, environ: Mapping[str, str], note: Note) -> None:
        self._environ = environ
        is_named = bool(environ.get("FORGEMQ_KAFKA"))
        self._own = None if is_named else LocalBroker(folder, progress=note)
        self._connection: KafkaConnection | None = None
        self._starting: asyncio.Future[str] | None = None

    @property
    def is_own(self) -> bool:
        """Whether the broker belongs to the run, so that it ends with it."""
        return self._own is not None

    @property
    def connection(self) -> KafkaConnection:
        """How to reach it; after `start` only."""
        assert self._connection is not None, "start comes first"
        return self._connection

    async def start(self, *, stop: asyncio.Event | None = None) -> bool:
        """Have a broker; the first start on a machine also downloads the jars of Kafka.

        Returns:
            Whether there is one; False if `stop` was set first. `stop()` then ends the start.
        """
        if self._own is None:
            self._connection = kafka_connection(self._environ)
            return True
        # Not a task of ours: cancelling it halfway through would leave a Kafka process behind.
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
        """Restart the run's own broker at its old address whenever it dies, until cancelled.

        A start that fails counts as another death: what fills its disk or has its port may go.

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
            try:
                await asyncio.shield(self._starting)
            except BrokerError as error:
                note(f"Kafka did not start: {error}")

    async def stop(self) -> None:
        """Stop the run's own broker, with a clean shutdown of its log; idempotent."""
        if self._own is None:
            return
        if self._starting is not None:
            self._own.abandon()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.to_thread(self._own.stop)
