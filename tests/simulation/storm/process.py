"""One process of a service over the cluster: its life, and the log as it sees it."""

import asyncio
import io
from collections.abc import Callable, Mapping, Sequence

from forgemq_bus.errors import ClosedError, FencedError, LogUnavailableError
from forgemq_bus.log import (
    READ_BYTES_MAX,
    AssignmentCallback,
    Emit,
    Isolation,
    Place,
    Record,
    Subscription,
)
from forgemq_bus.memory import MemoryLog, MemoryTransactionWriter, MemoryWriter
from forgemq_bus.memory_reader import MemoryReader
from forgemq_bus.names import broker_place, in_run
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_shell.loop_watch import LoopWatch
from forgemq_telemetry import Telemetry
from tests.simulation.storm.cluster import StormStore
from tests.simulation.storm.faults import Faults, Point
from tests.simulation.storm.membership import SESSION_S, Coordinator, StormMember

_PROMISES = {
    topic.name
    for topic in (topics.REQUESTED_GROUPS, topics.OPENED_EPISODES, topics.FINISHED_EPISODES)
}


class KilledError(Exception):
    """The process is gone: each of its calls to the log ends with this."""


class Process:
    """A process: alive, standing still or killed; what a service's `main` gets as context.

    Args:
        log: Handle on the cluster; its store is a `StormStore`.
        coordinator: Of the consumer groups.
        faults: What happens to this process.

    Attributes:
        answered: Records of which the process knows that they stand.
    """

    def __init__(
        self,
        log: MemoryLog,
        *,
        coordinator: Coordinator,
        faults: Faults,
        configuration: RunConfiguration,
        environ: Mapping[str, str],
    ) -> None:
        self.configuration = configuration
        self.environ = environ
        self._lines = io.StringIO()
        self.telemetry = Telemetry(service="storm", stream=self._lines)
        self.stop = asyncio.Event()
        self.loop_watch = LoopWatch()
        self.log = StormLog(log, self)
        self.coordinator = coordinator
        self.is_killed = False
        self.members: list[StormMember] = []
        self.answered: list[Emit] = []
        self._faults = faults
        self._awake_s = 0.0

    def event_count(self, name: str) -> int:
        """How often the process reported this event."""
        return self._lines.getvalue().count(f'"event":"{name}"')

    async def reach(self, point: Point) -> None:
        """Go on, or not: here faults happen.

        Raises:
            KilledError: the process is killed, here or before.
            LogUnavailableError: the log gives no answer.
        """
        self.check_alive()
        fault = self._faults.at(point)
        if fault is None:
            await self.pass_gate()
        elif fault.kind == "kill":
            self.kill()
            raise KilledError
        elif fault.kind == "no_answer":
            raise LogUnavailableError(f"no answer at {point}")
        else:
            self._stand_still(fault.pause_s)
            await self.pass_gate()

    def check_alive(self) -> None:
        """Raise if the process is killed."""
        if self.is_killed:
            raise KilledError

    async def pass_gate(self) -> None:
        """Wait while the process stands still."""
        while (left_s := self._awake_s - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)  # The pause may have become longer meanwhile.
        self.check_alive()

    def is_awake(self) -> bool:
        """Whether the process sends heartbeats."""
        return not self.is_killed and self._awake_s <= asyncio.get_running_loop().time()

    def kill(self) -> None:
        """Let every later call fail; its consumer groups notice after the session timeout."""
        self.is_killed = True
        self._expel_after(SESSION_S)

    def _stand_still(self, pause_s: float) -> None:
        """Let every call wait; a pause over the session timeout makes the process a zombie."""
        self._awake_s = asyncio.get_running_loop().time() + pause_s
        if pause_s > SESSION_S:
            self._expel_after(SESSION_S)

    def _expel_after(self, delay_s: float) -> None:
        for member in self.members:
            asyncio.get_running_loop().call_later(delay_s, self.coordinator.expel, member)


class StormLog:
    """Implements `log.Log` for one process."""

    def __init__(self, log: MemoryLog, process: Process) -> None:
        self._log = log
        self._process = process
        self._run = log._run
        assert isinstance(log._store, StormStore)
        self._store: StormStore = log._store
        self.values = log.values

    async def create_topics(self, partitions: Mapping[str, int]) -> frozenset[str]:
        raise NotImplementedError("the storm creates them")

    async def reader(
        self,
        positions: Mapping[Place, int],
        *,
        isolation: Isolation = "committed",
        has_values: bool = True,
        gathers: bool = False,
    ) -> "StormReader":
        await self._process.reach("reader")
        reader = await self._log.reader(
            positions, isolation=isolation, has_values=has_values, gathers=gathers
        )
        return StormReader(reader, self._process)

    async def member(
        self,
        *,
        group: str,
        topics: Sequence[str],
        on_assigned: AssignmentCallback,
        on_revoked: AssignmentCallback,
        has_records: bool = True,
    ) -> StormMember:
        await self._process.reach("reader")
        subscription = Subscription(
            group=in_run(group, run=self._run),
            topics=tuple(topics),
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            has_records=has_records,
        )
        reader = await self._log.reader({})
        member = StormMember(reader, subscription, process=self._process)
        self._process.members.append(member)
        await self._process.coordinator.join(member)
        return member

    async def writer(self) -> "StormWriter":
        return StormWriter(await self._log.writer(), self._process)

    async def transaction_writer(self, transactional_id: str) -> "StormTransactionWriter":
        await self._process.reach("open_writer")
        name = in_run(transactional_id, run=self._run)
        # Nothing comes between: the broker answers a fence once the older transaction has ended.
        await self._store.settled(name)
        writer = StormTransactionWriter(
            self._store, transactional_id=name, run=self._run, process=self._process
        )
        await self._process.reach("opened_writer")
        return writer

    async def committed(self, *, group: str, places: Sequence[Place]) -> dict[Place, int]:
        await self._process.reach("positions")
        await self._store.stable(in_run(group, run=self._run))
        await self._process.pass_gate()
        return await self._log.committed(group=group, places=places)

    async def first_positions(self, places: Sequence[Place]) -> dict[Place, int]:
        await self._process.reach("positions")
        return await self._log.first_positions(places)

    async def end_positions(
        self, places: Sequence[Place], *, isolation: Isolation = "committed"
    ) -> dict[Place, int]:
        await self._process.reach("positions")
        return await self._log.end_positions(places, isolation=isolation)

    async def trim(self, before: Mapping[Place, int]) -> None:
        raise NotImplementedError("the storm trims")

    async def close(self) -> None:
        """Nothing: readers and writers are closed by those who opened them."""


class StormReader:
    """Implements `log.Reader`; a process can end after it took records and before it used them."""

    def __init__(self, reader: MemoryReader, process: Process) -> None:
        self._reader = reader
        self._process = process
        self.position: Callable[[Place], int] = reader.position
        self.seek = reader.seek
        self.pause = reader.pause
        self.resume = reader.resume
        self.close = reader.close

    async def read(
        self, *, timeout_s: float, records_max: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Record]:
        await self._process.pass_gate()
        records = await self._reader.read(
            timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max
        )
        if records:
            await self._process.reach("read")
        return records


class StormWriter:
    """Implements `log.Writer`."""

    def __init__(self, writer: MemoryWriter, process: Process) -> None:
        self._writer = writer
        self._process = process
        self.close = writer.close

    async def write(self, emit: Emit) -> int:
        return (await self.write_all([emit]))[0]

    async def write_all(self, emits: Sequence[Emit]) -> list[int]:
        await self._process.reach(_commit_of(emits))
        offsets = await self._writer.write_all(emits)
        await self._process.reach("committed")
        self._process.answered += emits
        return offsets


class StormTransactionWriter(MemoryTransactionWriter):
    """Implements `log.TransactionWriter`; a commit that fails leaves it dead, as on Kafka."""

    def __init__(
        self, store: StormStore, *, transactional_id: str, run: str, process: Process
    ) -> None:
        super().__init__(
            store,
            transactional_id=transactional_id,
            run=run,
            blobs=None,
            inline_bytes_max=900_000,
        )
        self._storm = store
        self._process = process
        self._is_dead = False

    async def commit(
        self, *, outputs: Sequence[Emit], group: str, positions: Mapping[Place, int]
    ) -> None:
        """Write, then decide; the process can end or stand still before, between and after."""
        if self._is_dead:
            raise ClosedError("a commit has failed before")
        self._is_dead = True
        name = in_run(group, run=self._run)
        await self._process.reach(_commit_of(outputs))
        await self._storm.settled(self._transactional_id)
        transaction = await self._begin(outputs)
        await self._process.reach("written")
        if not self._storm.is_newest(self._transactional_id, epoch=self._epoch):
            raise FencedError(f"{self._transactional_id}: fenced during a commit")
        self._storm.commit(
            transaction,
            {(name, broker_place(place, run=self._run)): at for place, at in positions.items()},
        )
        await self._process.reach("committed")
        self._process.answered += outputs
        self._is_dead = False


def _commit_of(emits: Sequence[Emit]) -> Point:
    return "promise" if any(emit.topic in _PROMISES for emit in emits) else "commit"
