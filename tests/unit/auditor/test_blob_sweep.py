"""The sweep against a log and a store, with every fault that may cross it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from forgemq_auditor.blob_sweep import BlobSweep, Clocks, Swept, places_of_run
from forgemq_bus.blobs import BlobStore, blob_name
from forgemq_bus.errors import BlobError, LogUnavailableError
from forgemq_bus.kept_records import read_from
from forgemq_bus.log import Emit, Place, Record
from forgemq_bus.memory import MemoryLog
from forgemq_bus.memory_reader import MemoryReader
from forgemq_bus.partitions import dead_letters_of, partition_counts
from forgemq_bus.payloads import BLOB_HEADER, reference_of
from forgemq_contracts import topics
from forgemq_contracts.fields import BlobReference
from tests.small_run import small_run
from tests.unit.run_view.synthetic import configuration

GRACE_S = 90.0
WRITE_S_MAX = 30.0
LAG_S_MAX = 40.0
PLACES = (
    Place(topics.MERGER_JOURNAL.name, 0),
    Place(topics.MERGER_JOURNAL.name, 1),
    Place(topics.FINISHED_COMPLETIONS.name, 0),
    dead_letters_of(topics.FINISHED_COMPLETIONS),
)
CONTENTS = tuple(b"content %d" % number for number in range(5))


@dataclass
class Now:
    s: float = 1_795_003_200.0


class UnsteadyStore(BlobStore):
    """A store that fails some deletions, before or after some of them."""

    draws: random.Random | None = None

    async def delete(self, minute: str, names: Sequence[str]) -> None:
        if self.draws is None or self.draws.random() < 0.6:
            return await super().delete(minute, names)
        done = self.draws.randrange(len(names) + 1)
        if done:
            await super().delete(minute, names[:done])
        raise BlobError("the store went away")


class UnsteadyReader:
    """Gives two records at a time, and breaks off now and then."""

    def __init__(self, reader: MemoryReader, draws: random.Random | None) -> None:
        self._reader = reader
        self._draws = draws
        self.position, self.seek, self.close = reader.position, reader.seek, reader.close

    async def read(self, *, timeout_s: float, records_max: int) -> list[Record]:
        if self._draws is not None and self._draws.random() < 0.2:
            raise LogUnavailableError("the broker went away")
        return await self._reader.read(timeout_s=timeout_s, records_max=min(2, records_max))


class UnsteadyLog(MemoryLog):
    """A log whose readers break off now and then."""

    draws: random.Random | None = None

    async def reader(self, *arguments, **options) -> UnsteadyReader:  # type: ignore[override]
        return UnsteadyReader(await super().reader(*arguments, **options), self.draws)


@dataclass
class Scene:
    """One run: writers whose clocks lag and who may die, trims, and auditors that may die."""

    uri: str
    draws: random.Random
    now: Now = field(default_factory=Now)
    waiting: list[tuple[float, float, BlobReference]] = field(default_factory=list)
    put_s: dict[str, float] = field(default_factory=dict)
    deleted: int = 0
    failed: int = 0

    async def open(self) -> "Scene":
        self.log = UnsteadyLog(run="r")
        await self.log.create_topics(partition_counts(small_run(group_partitions=2)))
        self.store = UnsteadyStore(self.uri, run="r", clock_s=lambda: self.now.s)
        self.sweeps = [self.new_sweep()]
        self.hanging = 0
        return self

    def new_sweep(self) -> BlobSweep:
        clocks = Clocks(monotonic_s=lambda: self.now.s, wall_s=lambda: self.now.s)
        return BlobSweep(
            self.log, self.store, configuration=configuration(), grace_s=GRACE_S, clocks=clocks
        )

    async def put(self) -> None:
        """A writer stores a value; it writes the record a while later, or dies."""
        lag_s = self.draws.uniform(0, LAG_S_MAX)
        store = BlobStore(self.uri, run="r", clock_s=lambda: self.now.s - lag_s)
        reference = await store.put(self.draws.choice(CONTENTS))
        self.put_s[blob_name(reference)] = self.now.s
        due_s = self.now.s + self.draws.uniform(0, WRITE_S_MAX)
        self.waiting.append((due_s, self.now.s, reference))

    async def write(self, reference: BlobReference) -> None:
        place = self.draws.choice(PLACES)
        header = (BLOB_HEADER, msgspec.msgpack.encode(reference))
        emit = Emit(
            topic=place.topic, partition=place.partition, key=b"", value=b"", headers=(header,)
        )
        match self.draws.choice(("plain", "plain", "committed", "aborted", "hanging", "dead")):
            case "plain":
                await (await self.log.writer()).write(emit)
            case "committed":
                writer = await self.log.transaction_writer("t")
                await writer.commit(outputs=[emit], group="g", positions={})
            case "aborted":
                await (await self.log.transaction_writer("t")).abort(outputs=[emit])
            case "hanging":
                self.hanging += 1
                writer = await self.log.transaction_writer(f"hangs-{self.hanging}")
                await writer.abandon(outputs=[emit])

    async def pass_time(self) -> None:
        until_s = self.now.s + self.draws.uniform(0, 50)
        for due_s, _, reference in sorted(self.waiting, key=lambda each: each[0]):
            if due_s <= until_s:
                self.now.s = max(self.now.s, due_s)
                await self.write(reference)
        self.waiting = [each for each in self.waiting if each[0] > until_s]
        self.now.s = until_s

    async def trim(self) -> None:
        place = self.draws.choice(PLACES)
        first = (await self.log.first_positions([place]))[place]
        end = (await self.log.end_positions([place]))[place]
        if end > first:
            await self.log.trim({place: self.draws.randint(first, end)})

    async def sweep(self) -> None:
        """By the auditor, or by an older one that does not know that it is not the active one."""
        try:
            self.deleted += (await self.draws.choice(self.sweeps).sweep()).deleted
        except (BlobError, LogUnavailableError):
            self.failed += 1
        await self.check()

    async def restart(self) -> None:
        self.sweeps = [*self.sweeps[-1:], self.new_sweep()]

    async def referenced(self) -> set[str]:
        """Every blob that a record on the log points at, also one of an open transaction."""
        starts = await self.log.first_positions(places_of_run(configuration()))
        draws, self.log.draws = self.log.draws, None
        found = set()
        async for records in read_from(self.log, starts, isolation="uncommitted", has_values=False):
            found |= {blob_name(r) for r in map(reference_of, records) if r is not None}
        self.log.draws = draws
        return found

    async def stored(self) -> set[str]:
        return {
            f"{minute}/{file.name}"
            for minute in await self.store.list_minutes()
            for file in await self.store.list_blobs(minute)
        }

    async def check(self) -> None:
        """Nothing is gone that a record points at, that one will point at, or that is young."""
        young = {blob for blob, at_s in self.put_s.items() if self.now.s - at_s < GRACE_S}
        coming = {blob_name(reference) for _, _, reference in self.waiting}
        assert (await self.referenced()) | young | coming <= await self.stored()


@pytest.mark.simulation
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 40))]
)
async def test_nothing_needed_is_ever_deleted_and_all_else_is_in_the_end(seed: int, tmp_path: Path):
    draws = random.Random(seed)
    scene = await Scene(f"memory://{tmp_path}", draws).open()
    scene.log.draws = scene.store.draws = draws
    actions = [scene.put] * 6 + [scene.pass_time] * 6 + [scene.trim] * 3 + [scene.sweep] * 8
    for _ in range(150):
        await draws.choice([*actions, scene.restart] if draws.random() < 0.2 else actions)()
    scene.log.draws = scene.store.draws = None
    while scene.waiting:
        await scene.pass_time()
    for _ in range(4):
        scene.now.s += GRACE_S
        scene.deleted += (await scene.sweeps[-1].sweep()).deleted
        await scene.check()
    assert await scene.stored() == await scene.referenced()
    assert scene.deleted > 0
    assert scene.failed > 0


async def test_a_superseded_snapshot_goes_and_the_newest_stays(tmp_path: Path):
    """A journal is trimmed below its newest snapshot; snapshots above the limit are blobs."""
    now = Now()
    store = BlobStore(str(tmp_path), run="r", clock_s=lambda: now.s)
    log = MemoryLog(run="r", blobs=store, inline_bytes_max=100)
    await log.create_topics(partition_counts(small_run(group_partitions=2)))
    clocks = Clocks(monotonic_s=lambda: now.s, wall_s=lambda: now.s)
    sweep = BlobSweep(log, store, configuration=configuration(), grace_s=60, clocks=clocks)
    journal = PLACES[0]
    writer = await log.transaction_writer("merger-0")
    for number in range(3):
        snapshot = Emit(topic=journal.topic, partition=0, key=b"", value=bytes([number]) * 5_000)
        await writer.commit(outputs=[snapshot], group="merger-positions", positions={})
        now.s += 60
    assert await sweep.sweep() == Swept()
    now.s += 60
    before = await sweep.sweep()
    assert (before.kept, before.deleted) == (3, 0)
    await log.trim({journal: 4})
    now.s += 60
    assert (await sweep.sweep()).deleted == 0, "it has only now seen the trim"
    now.s += 60
    done = await sweep.sweep()
    assert (done.kept, done.deleted) == (1, 2)
    assert done.deleted_bytes + done.kept_bytes == before.kept_bytes
    reader = await log.reader({journal: 4})
    (kept,) = await reader.read(timeout_s=0, records_max=9)
    assert kept.value == bytes([2]) * 5_000


async def test_each_value_is_counted_once_by_topic_wherever_it_lies(tmp_path: Path):
    store = BlobStore(str(tmp_path), run="r")
    log = MemoryLog(run="r", blobs=store, inline_bytes_max=100)
    await log.create_topics(partition_counts(small_run(group_partitions=2)))
    sweep = BlobSweep(log, store, configuration=configuration(), grace_s=60)
    writer = await log.writer()
    for place, size in ((PLACES[0], 5_000), (PLACES[2], 40), (PLACES[2], 2)):
        await writer.write(Emit(topic=place.topic, partition=0, key=b"", value=bytes(size)))
    await sweep.sweep()
    assert sweep.take_bytes() == {PLACES[0].topic: 5_000, PLACES[2].topic: 42}
    await writer.write(Emit(topic=PLACES[2].topic, partition=0, key=b"", value=bytes(7)))
    await sweep.sweep()
    assert sweep.take_bytes() == {PLACES[2].topic: 7}


async def test_blobs_are_not_fetched_to_learn_who_points_at_them(tmp_path: Path):
    class SealedStore(BlobStore):
        async def get(self, reference: BlobReference) -> bytes:
            raise AssertionError(f"fetched {reference.uri}")

    scene = await Scene(str(tmp_path), random.Random(0)).open()
    sealed = SealedStore(str(tmp_path), run="r")
    log = scene.log.open()
    log._blobs = sealed
    log._inline_bytes_max = 10
    place = PLACES[0]
    value = b"large enough" * 9
    writer = await log.writer()
    await writer.write(Emit(topic=place.topic, partition=0, key=b"", value=value))
    sweep = BlobSweep(log, sealed, configuration=configuration(), grace_s=0)
    await sweep.sweep()
    assert (await sweep.sweep()).kept == 1
