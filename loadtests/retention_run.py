"""A run in one process: real transform tasks and auditor, and everything else from outside."""

import asyncio
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from retention_outside import RUN, Outside, Workload, partition_of

from forgemq_auditor.blob_sweep import BlobSweep, Clocks, places_of_run
from forgemq_auditor.group_audit import GroupAudit
from forgemq_auditor.log_trim import trim_log
from forgemq_auditor.settings import AuditorSettings
from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Emit, Log, Place, Reader, Record
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partitions_of
from forgemq_bus.payloads import reference_of
from forgemq_contracts import topics
from forgemq_contracts.asked_keys import AskedKeys
from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_contracts.messages import Core, Output
from forgemq_contracts.ownership import OwnedRun
from forgemq_contracts.steps import ScheduledStep
from forgemq_contracts.topic import needed_group
from forgemq_merger import app as merger
from forgemq_reward import app as reward
from forgemq_scheduler import app as scheduler
from forgemq_shell.records import emit_of
from forgemq_shell.task import TransformTask
from forgemq_shell.transform_settings import TransformSettings
from forgemq_telemetry import Telemetry

ROUND_S = AuditorSettings().trim_every_s
SWEEP_GRACE_S = 60.0
"""Instead of an hour, which is 41,667 completions."""

TRANSFORMS = {
    "reward": reward.transform_of,
    "merger": merger.transform_of,
    "scheduler": scheduler.transform_of,
}
# A batch is what is there, and time passes only with completions: nothing waits for more.
SETTINGS = TransformSettings(batch_linger_s=0.0)
PARTITIONS_NEEDED = {
    needed_group("gateway"): (
        topics.REQUESTED_COMPLETIONS,
        topics.CANCELLED_COMPLETIONS,
        topics.FINISHED_COMPLETIONS,
        topics.DELIVERED_COMPLETIONS,
        topics.OWNED_RUNS,
        topics.REPORTED_GATEWAYS,
    ),
    "reward-grading": (topics.FINISHED_COMPLETIONS,),
    needed_group("trainer"): (topics.MERGED_TREES,),
}
"""What is committed from outside, for each group of positions."""


@dataclass(kw_only=True)
class Retained:
    """What a run has written, and what was left of it."""

    completions: int = 0
    written_bytes: int = 0
    kept_bytes: int = 0
    held_bytes_max: int = 0
    blob_bytes: int = 0
    blob_bytes_max: int = 0
    written_by_topic: Counter[str] = field(default_factory=Counter)
    held_by_topic: dict[str, int] = field(default_factory=dict)
    snapshot_bytes: dict[str, int] = field(default_factory=dict)


class Books:
    """The size of every record that was written, until it is trimmed."""

    def __init__(self, log: Log, reader: Reader, places: Sequence[Place]) -> None:
        self._log = log
        self._reader = reader
        self._places = places
        self._sizes: dict[Place, dict[int, int]] = {place: {} for place in places}
        self.written: Counter[str] = Counter()
        self.blob_bytes = 0

    async def read_on(self) -> None:
        """Take in what is new."""
        while records := await self._reader.read(timeout_s=0.0, records_max=5000):
            for record in records:
                size = len(record.key) + len(record.value) + _header_bytes(record)
                self._sizes[record.place][record.offset] = size
                self.written[record.topic] += size
                reference = reference_of(record)
                self.blob_bytes += reference.size_bytes if reference else 0

    async def held(self) -> dict[str, int]:
        """Bytes on the log by topic, of those that are trimmed."""
        first = await self._log.first_positions(self._places)
        held: Counter[str] = Counter()
        for place, sizes in self._sizes.items():
            if place.topic not in topics.BY_NAME or not topics.BY_NAME[place.topic].needed_by:
                continue
            for offset in [offset for offset in sizes if offset < first[place]]:
                del sizes[offset]
            held[place.topic] += sum(sizes.values())
        return held


def _header_bytes(record: Record) -> int:
    return sum(len(name) + len(value) for name, value in record.headers)


class Run:
    """One compressed run."""

    def __init__(self, workload: Workload, *, log: MemoryLog, blobs: BlobStore) -> None:
        self.outside = Outside(workload)
        self.result = Retained()
        self._workload = workload
        self._configuration = workload.configuration
        self._log = log
        self._blobs = blobs
        self._cores: list[tuple[str, Core]] = []
        self._marks: dict[str, dict[Place, int]] = {}  # By open group, oldest first.
        self._newest_mark: dict[Place, int] = {}
        self._asked = AskedKeys()
        self._round_s = 0.0
        self._requested = self._retired = 0

    async def open(self) -> None:
        """Start the tasks' readers, the books and the auditor."""
        configuration, log = self._configuration, self._log
        places = places_of_run(configuration)
        await log.create_topics(_partition_counts(places))
        reader = await log.reader(dict.fromkeys(places, 0), has_values=False)
        self._books = Books(log, reader, places)
        answers = (topics.ADMITTED_GROUPS, topics.SCHEDULED_STEPS, topics.RETIRED_GROUPS)
        answered = [place for topic in answers for place in partitions_of(topic, configuration)]
        self._answers = await log.reader(dict.fromkeys(answered, 0))
        self._writer = await log.writer()
        self._committer = await log.transaction_writer("outside")
        self._audit = await GroupAudit.open(log, configuration=configuration)
        clocks = Clocks(monotonic_s=self.clock_s, wall_s=self.clock_s)
        self._sweep = BlobSweep(
            log, self._blobs, configuration=configuration, grace_s=SWEEP_GRACE_S, clocks=clocks
        )

    def clock_s(self) -> float:
        """The run's clock."""
        return self.outside.now_s

    def tasks(self, stop: asyncio.Event) -> list[TransformTask]:
        """Every task of reward, merger and scheduler, with fresh cores."""
        tasks = []
        for service, transform_of in TRANSFORMS.items():
            transform = transform_of(self._configuration, {})
            for number in range(transform.partitions(self._configuration)):
                core = transform.make_core(number)
                self._cores.append((service, core))
                plan = transform.plan(number, configuration=self._configuration, settings=SETTINGS)
                task = TransformTask(
                    plan,
                    log=self._log.open(),
                    core=core,
                    telemetry=Telemetry(service=service, stream=io.StringIO()),
                    stop=stop,
                    clock_s=self.clock_s,
                )
                tasks.append(task)
        return tasks

    async def play(self, groups: int) -> None:
        """Request so many groups, and play and train them until all have retired."""
        await self._write(self.outside.reports())
        while self._retired < groups:
            await self._request(groups)
            admitted = await self._answer()
            if admitted:
                await self._play_together(admitted)
        await self._round()
        await self._books.read_on()
        self.result.completions = self.outside.completions
        self.result.written_by_topic = self._books.written
        self.result.written_bytes = self._books.written.total()
        self.result.kept_bytes = sum(
            size for name, size in self._books.written.items() if not _is_trimmed(name)
        )
        self.result.blob_bytes = self._books.blob_bytes

    async def _request(self, groups: int) -> None:
        while self._requested < min(groups, self._retired + 2 * self._workload.slots):
            emit = self.outside.requested(self._requested)
            # As the gateway does: a mark is of the time before the group's first record.
            if self._requested % self._workload.slots == 0:
                self._newest_mark = await self._ends()
            self._marks[emit.key.decode()] = self._newest_mark
            self._asked.add(f"d/{self._requested}", domain="d")
            self._requested += 1
            await self._write([emit])

    async def _ends(self) -> dict[Place, int]:
        wanted = {topic for named in PARTITIONS_NEEDED.values() for topic in named}
        places = [p for topic in wanted for p in partitions_of(topic, self._configuration)]
        return await self._log.end_positions(places)

    async def _answer(self) -> list[AdmittedGroup]:
        """Train what is scheduled, note what retires; returns what is admitted."""
        admitted = []
        for record in await self._answers.read(timeout_s=0.2, records_max=1000):
            answer = topics.decode(topics.BY_NAME[record.topic], record.value)
            match answer:
                case AdmittedGroup():
                    admitted.append(answer)
                case RetiredGroup():
                    assert answer.reason == "trained", answer
                    self._retired += 1
                    del self._marks[answer.group_id]
                case ScheduledStep():
                    await self._commit([self.outside.trained(answer)])
                    await self._write(self.outside.loaded())
        return admitted

    async def _play_together(self, groups: Sequence[AdmittedGroup]) -> None:
        opened = [self.outside.opened(group) for group in groups]
        playing = [one for episodes, _ in opened for one in episodes]
        await self._write([emit for _, emits in opened for emit in emits])
        for _ in range(self._workload.turns):
            for one in playing:
                place = Place(topics.FINISHED_COMPLETIONS.name, partition_of(one.group))
                offset = (await self._log.end_positions([place]))[place]
                await self._write(self.outside.turn(one, offset))
                await self._write(self.outside.heartbeats())
                if self.clock_s() - self._round_s >= ROUND_S:
                    await self._round()
            await asyncio.sleep(0)
        for one in playing:
            await self._write(self.outside.ended(one))

    async def _round(self) -> None:
        """What happens every 30 s: marks, audit, trim, sweep; then count."""
        self._round_s = self.clock_s()
        await self._settle()
        await self._commit_marks()
        while (await self._audit.audit()).has_more:
            pass
        await self._books.read_on()
        await trim_log(self._log, self._configuration)
        swept = await self._sweep.sweep()
        held = await self._books.held()
        result = self.result
        for topic, size in held.items():
            result.held_by_topic[topic] = max(size, result.held_by_topic.get(topic, 0))
        result.held_bytes_max = max(result.held_bytes_max, sum(held.values()))
        result.blob_bytes_max = max(result.blob_bytes_max, swept.kept_bytes)
        for service, core in self._cores:
            size = len(core.snapshot())
            result.snapshot_bytes[service] = max(size, result.snapshot_bytes.get(service, 0))

    async def _settle(self) -> None:
        """Let every task handle what is there."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def _commit_marks(self) -> None:
        mark = next(iter(self._marks.values()), None) or await self._ends()
        owned = OwnedRun(
            run=RUN,
            owner=1,
            owned_ms=self.outside.now_ms,
            asked_keys=self._asked.to_bytes(),
            asked_before=(self._requested,),
        )
        emit = emit_of(Output(topic=topics.OWNED_RUNS.name, partition=0, record=owned))
        for group, needed in PARTITIONS_NEEDED.items():
            names = {topic.name for topic in needed}
            positions = {place: at for place, at in mark.items() if place.topic in names}
            outputs = [emit] if topics.OWNED_RUNS.name in names else []
            await self._committer.commit(outputs=outputs, group=group, positions=positions)

    async def _write(self, emits: Sequence[Emit]) -> None:
        if emits:
            await self._writer.write_all(emits)

    async def _commit(self, emits: Sequence[Emit]) -> None:
        await self._committer.commit(outputs=emits, group="outside", positions={})


def _is_trimmed(name: str) -> bool:
    return name in topics.BY_NAME and bool(topics.BY_NAME[name].needed_by)


def _partition_counts(places: Sequence[Place]) -> dict[str, int]:
    return dict(Counter(place.topic for place in places))


async def retained(workload: Workload, *, groups: int, folder: str) -> Retained:
    """Run so many groups of the workload; blobs go to the folder."""
    clock: list[Run] = []

    def clock_s() -> float:
        return clock[0].clock_s() if clock else 0.0

    blobs = BlobStore(folder, run=RUN, clock_s=clock_s)
    log = MemoryLog(run=RUN, blobs=blobs, clock_ms=lambda: int(clock_s() * 1000))
    run = Run(workload, log=log, blobs=blobs)
    clock.append(run)
    await run.open()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(task.run()) for task in run.tasks(stop)]
        await run.play(groups)
        for task in running:
            task.cancel()
    await log.close()
    return run.result
