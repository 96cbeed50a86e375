"""One schedule: several processes of a service, what goes wrong around them, and what is checked.

Everything is drawn from one seed: sizes, settings, faults, delays, trimming and expiry.
"""

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from forgemq_auditor.log_trim import trim_log
from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.names import broker_place, in_run
from forgemq_contracts import topics
from forgemq_contracts.messages import Core
from forgemq_contracts.run import RunConfiguration
from forgemq_settings.environment import parse
from forgemq_shell.comparison import compare
from forgemq_shell.journal import JournalError
from forgemq_shell.restore import restore
from forgemq_shell.task_plan import TaskPlan
from forgemq_shell.transform_settings import TransformSettings
from tests.simulation.storm.cases import StormCase
from tests.simulation.storm.cluster import StormStore
from tests.simulation.storm.faults import Faults, NumberedFaults, Point, SeededFaults
from tests.simulation.storm.loop import run_virtual
from tests.simulation.storm.membership import Coordinator
from tests.simulation.storm.oracle import Oracle, Undisturbed, ViolationError
from tests.simulation.storm.process import KilledError, Process
from tests.simulation.storm.weather import Weather, drawn_weather

RUN = "sim"
STUCK_S = 600.0
"""Virtual seconds after the last record: every fault is over and every pause many times."""

_POLL_S = 0.5
_DEATHS = (KilledError, LogUnavailableError)
"""What may end a process; the supervisor starts it again. Everything else is a defect."""


@dataclass(kw_only=True)
class Outcome:
    """What a schedule went through."""

    tasks: Sequence[Undisturbed]
    deaths: int = 0
    fenced: int = 0
    assigned: int = 0
    trimmed: int = 0
    expired: int = 0
    snapshots_missed: int = 0


class Schedule:
    """Runs one schedule; for one use.

    Args:
        case: The service and its inputs.
        weather: What is around it.
        faults: What happens to its processes.
        rng: Draws delays and waits.
    """

    def __init__(
        self, case: StormCase, weather: Weather, *, faults: Faults, rng: random.Random
    ) -> None:
        self._case = case
        self._weather = weather
        self._faults = faults
        self._rng = rng
        log = replace(case.configuration.log, group_partitions=weather.partitions)
        self._configuration: RunConfiguration = replace(case.configuration, log=log)
        self._store = StormStore(lambda: rng.uniform(0.0, weather.marker_delay_s))
        self._log = MemoryLog(run=RUN)
        self._log._store = self._store
        self._transform = case.make_transform(self._configuration, weather.environ)
        self._settings = parse(
            TransformSettings, prefix="FORGEMQ_TRANSFORM_", environ=weather.environ
        )
        self._coordinator = Coordinator()
        self._processes: list[Process] = []
        self._is_over = asyncio.Event()
        self._errors: list[Exception] = []
        self.outcome = Outcome(tasks=())

    async def run(self) -> Outcome:
        """Write the script into the storm, wait until all of it is handled, and check.

        Raises:
            ViolationError: the log is not as it must be.
            Exception: what ended a process and is no fault of the storm's.
        """
        await self._create_topics()
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self._disturb())]
            for number in range(self._weather.processes):
                group.create_task(self._supervise(0.01 * number))
            try:
                await self._write_script()
                await self._wait_until_handled()
            finally:
                self._is_over.set()
                for process in self._processes:
                    process.stop.set()
                for task in beside:
                    task.cancel()
        await self._coordinator.close()
        if self._errors:
            raise self._errors[0]
        await self._check()
        return self.outcome

    async def _create_topics(self) -> None:
        counts = {topic.name: self._weather.partitions for topic in topics.OF_RUN}
        dead = {topic.dlq_name: 1 for topic in topics.OF_RUN if topic.has_dlq}
        await self._log.create_topics(counts | dead)

    async def _supervise(self, wait_s: float) -> None:
        """Keep one process running, as the launcher does."""
        while True:
            await asyncio.sleep(wait_s)
            if self._is_over.is_set():
                return
            wait_s = self._rng.uniform(0.01, 0.5)
            process = self._new_process(self._faults)
            self._processes.append(process)
            try:
                await self._transform.run(process)
            except Exception as error:  # noqa: BLE001 - the storm's faults, or a defect
                defects = [e for e in causes_of(error) if not isinstance(e, _DEATHS)]
                self._errors += defects
                self.outcome.deaths += 1
                if defects:
                    self._is_over.set()
            finally:
                self._processes.remove(process)
                self.outcome.fenced += process.event_count("fenced")
                self.outcome.assigned += process.event_count("assigned")
                # No storm loses a blob: a snapshot that was committed can be read back.
                self.outcome.snapshots_missed += process.event_count("snapshot_lost")

    def _new_process(self, faults: Faults) -> Process:
        return Process(
            self._log.open(),
            coordinator=self._coordinator,
            faults=faults,
            configuration=self._configuration,
            environ=self._weather.environ,
        )

    async def _write_script(self) -> None:
        writer = await self._log.writer()
        scripts = [
            list(script)
            for script in self._case.scripts(
                self._weather.partitions, records=self._weather.records
            )
        ]
        while any(scripts):
            for script in scripts:
                count = self._rng.choice(self._weather.bursts)
                burst: Sequence[Emit] = script[:count]
                del script[:count]
                await writer.write_all(burst)
            await asyncio.sleep(self._rng.choice(self._weather.pauses_s))

    async def _wait_until_handled(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + STUCK_S
        while not self._errors and (missing := self._missing()):
            if loop.time() > deadline_s:
                self._errors.append(ViolationError(f"stuck; not handled: {missing}"))
            await asyncio.sleep(_POLL_S)

    def _missing(self) -> dict[Place, tuple[int, int]]:
        """Partitions that are not handled to their end: how far, and the end."""
        missing: dict[Place, tuple[int, int]] = {}
        for plan in self._plans():
            missing |= Oracle(self._log, run=RUN, plan=plan).unhandled()
        return missing

    def _plans(self) -> list[TaskPlan]:
        return [
            self._transform.plan(number, configuration=self._configuration, settings=self._settings)
            for number in range(self._transform.partitions(self._configuration))
        ]

    async def _disturb(self) -> None:
        """Trim, and forget positions, now and then."""
        while self._weather.has_trimming or self._weather.has_expiry:
            await asyncio.sleep(self._rng.uniform(0.05, 1.0))
            if self._weather.has_trimming:
                self._let_other_readers_pass()
                freed = await trim_log(self._log, self._configuration)
                self.outcome.trimmed += sum(freed.values())
            if self._weather.has_expiry and self._rng.random() < 0.5:
                self._expire_positions(self._rng.choice((0.3, 1.0)))

    def _expire_positions(self, rate: float) -> None:
        """Forget about this part of the service's positions."""
        groups = {in_run(name, run=RUN) for plan in self._plans() for name in _groups(plan)}
        self.outcome.expired += self._store.expire_positions(
            lambda group, _: group in groups and self._rng.random() < rate
        )

    def _let_other_readers_pass(self) -> None:
        """Commit the ends for all other services, so that this one alone holds the trimming."""
        own = {name for plan in self._plans() for name in _groups(plan)}
        for topic in topics.OF_RUN:
            for group in set(topic.needed_by) - own:
                for number in range(self._weather.partitions):
                    place = broker_place(Place(topic.name, number), run=RUN)
                    end = self._store.end_position(place, isolation="committed")
                    self._store.positions[in_run(group, run=RUN), place] = end

    async def _check(self) -> None:
        """Check each task: the oracle, a last restore, and the replay."""
        if self._store.went_back:
            raise ViolationError(f"positions went back: {self._store.went_back}")
        tasks = []
        for plan in self._plans():
            number = plan.journal.partition
            outputs = self._transform.output_places(number, configuration=self._configuration)
            oracle = Oracle(self._log, run=RUN, plan=plan)
            undisturbed = oracle.check(self._transform.make_core(number), outputs=outputs)
            # It opens the task's writer, and so waits until every transaction has its markers.
            await self._check_restore(plan, undisturbed)
            await self._check_replay(plan, outputs)
            tasks.append(undisturbed)
        self.outcome.tasks = tasks

    async def _check_replay(self, plan: TaskPlan, outputs: Sequence[Place]) -> None:
        """What is kept of the journal must write what stands on the log."""
        core = self._transform.make_core(plan.journal.partition)
        try:
            result = await compare(self._log, plan, core, outputs=outputs)
        except JournalError:
            newest = Oracle(self._log, run=RUN, plan=plan).batches()[-1]
            # Behind the only state that is left there is nothing that a replay could compare.
            if self.outcome.trimmed and newest.snapshot is not None:
                return
            raise
        if result.difference is not None:
            raise ViolationError(f"the replay differs: {result.difference}")

    async def lose_journal(self, *, batches: int) -> None:
        """Lose the newest batches of every journal; each task must refuse to start.

        Args:
            batches: At least 1; so many more are lost that one of them holds a record.

        Raises:
            ViolationError: a task starts as if nothing were missing.
        """
        for plan in self._plans():
            journal = Oracle(self._log, run=RUN, plan=plan).batches()
            newest = [n for n, batch in enumerate(journal) if any(i.topic for i in batch.inputs)]
            if not newest:
                continue
            lost = max(batches, len(journal) - newest[-1])
            self._store.lose_tail(broker_place(plan.journal, run=RUN), records=lost)
            try:
                await self._restore(plan)
            except JournalError:
                continue
            raise ViolationError(f"{plan.transactional_id} starts without {lost} batches")

    async def _check_restore(self, plan: TaskPlan, undisturbed: Undisturbed) -> None:
        """Start the task once more; it must come to the state of the undisturbed core."""
        core = await self._restore(plan)
        if core.snapshot() != undisturbed.snapshot:
            raise ViolationError("a restart comes to another state than an undisturbed run")

    async def _restore(self, plan: TaskPlan) -> Core:
        """The core of a task that starts, before it reads an input."""
        core, process = (
            self._transform.make_core(plan.journal.partition),
            self._new_process(NumberedFaults()),
        )
        await process.log.transaction_writer(plan.transactional_id)
        await restore(plan, log=process.log, core=core, telemetry=process.telemetry)
        return core


def _groups(plan: TaskPlan) -> tuple[str, str]:
    return plan.positions_group, plan.needed_group


def causes_of(error: BaseException) -> list[Exception]:
    """The errors themselves, out of the groups that task groups wrap them in."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in causes_of(inner)]
    return [error] if isinstance(error, Exception) else []


def run_seed(case: StormCase, seed: int) -> Outcome:
    """Run the schedule of this seed; every fifth ends with a journal that lost its tail.

    Raises:
        Exception: a defect; its note says how to run the schedule again.
    """
    rng = random.Random(f"{case.name} {seed}")
    weather = drawn_weather(rng, case)
    faults = SeededFaults(
        rng, probability=rng.choice((0.02, 0.1, 0.3)), faults_max=rng.choice((5, 15, 40))
    )
    schedule = Schedule(case, weather, faults=faults, rng=rng)
    lost = rng.randint(1, 3) if seed % 5 == 0 and not weather.has_expiry else 0
    try:
        return run_virtual(_run_and_lose(schedule, lost))
    except Exception as error:
        error.add_note(f"run it again: make storm CASE={case.name} FIRST={seed} SEEDS=1")
        raise


async def _run_and_lose(schedule: Schedule, lost: int) -> Outcome:
    outcome = await schedule.run()
    if lost:
        await schedule.lose_journal(batches=lost)
    return outcome


def run_numbered(case: StormCase, weather: Weather, faults: NumberedFaults) -> Outcome:
    """Run a schedule with faults at numbered points; nothing else in it is drawn.

    Ticks are on if the service has any.
    """
    if case.tick_setting:
        weather = dataclasses.replace(weather, environ=weather.environ | {case.tick_setting: "0.3"})
    rng = random.Random(case.name)
    return run_virtual(Schedule(case, weather, faults=faults, rng=rng).run())


def points_of(case: StormCase, weather: Weather) -> Sequence[Point]:
    """Every point of the schedule without a fault, in order."""
    faults = NumberedFaults()
    run_numbered(case, weather, faults)
    return faults.points
