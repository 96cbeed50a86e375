"""The grading loop of the reward service in the storm: an edge, so without a journal.

Its grades are written outside transactions and are idempotent; its positions say what a restart has
to read. So an episode may be graded twice, but never not at all, and no position may go back.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forgemq_auditor.log_trim import trim_log
from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.names import broker_place, in_run
from forgemq_contracts import topics
from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode
from forgemq_reward.grading_loop import GradingLoop
from forgemq_reward.grading_positions import GROUP
from forgemq_reward.settings import RewardSettings
from tests.simulation.cases import (
    CONFIGURATION,
    EPISODES,
    TURNS,
    emit,
    finished_completion,
    finished_episode,
    retired,
    shuffled_keeping_order,
)
from tests.simulation.storm.cluster import StormStore, committed_records
from tests.simulation.storm.faults import Faults, NumberedFaults, SeededFaults
from tests.simulation.storm.loop import run_virtual
from tests.simulation.storm.membership import Coordinator
from tests.simulation.storm.oracle import ViolationError
from tests.simulation.storm.process import KilledError, Process
from tests.simulation.storm.schedule import RUN, STUCK_S, causes_of

GROUPS = 6
RETIRED = (2, 5)
SETTINGS = RewardSettings(commit_every_s=0.3, records_max=7)
_POLL_S = 0.5
_DEATHS = (KilledError, LogUnavailableError)


@dataclass(kw_only=True)
class Graded:
    """What a schedule went through."""

    episodes: int = 0
    grades: int = 0
    deaths: int = 0
    fenced: int = 0
    trimmed: int = 0


def script(seed: int, *, groups: int) -> list[Emit]:
    """Completions, the episodes that name them and a few ends, of one partition, in any order."""
    numbers = [(group, index) for group in range(groups) for index in range(EPISODES)]
    completions = [
        emit(topics.FINISHED_COMPLETIONS, finished_completion(*number, turn))
        for number in numbers
        for turn in range(TURNS)
    ]
    episodes = [emit(topics.FINISHED_EPISODES, finished_episode(*number)) for number in numbers]
    ends = [emit(topics.RETIRED_GROUPS, retired(group)) for group in RETIRED if group < groups]
    return list(shuffled_keeping_order([completions, episodes, ends], seed=seed))


@dataclass(frozen=True, kw_only=True)
class GradingWeather:
    """What is around the grading of one schedule.

    Attributes:
        pauses_s: Between two bursts of the script.
        bursts: Numbers of records that are written at once.
        first_script: Number of the first partition's script.
        groups: Of each script.
        marker_delay_s: Longest delay of a transaction's marker; 0: there is none.
    """

    partitions: int
    processes: int
    pauses_s: tuple[float, ...]
    faults: Faults
    marker_delay_s: float
    first_script: int
    bursts: tuple[int, ...] = (1, 4, 12)
    groups: int = GROUPS


def drawn_weather(rng: random.Random, *, first_script: int) -> GradingWeather:
    """Draw a weather."""
    return GradingWeather(
        partitions=rng.choice((1, 3, 5)),
        processes=rng.choice((1, 2, 3)),
        pauses_s=rng.choice(((0.0, 0.05), (0.1, 0.6), (0.5, 2.0))),
        faults=SeededFaults(
            rng, probability=rng.choice((0.01, 0.05, 0.2)), faults_max=rng.choice((3, 10, 25))
        ),
        marker_delay_s=rng.choice((0.0, 0.05, 0.5)),
        first_script=first_script,
    )


class GradingSchedule:
    """Several grading processes over several partitions; for one use."""

    def __init__(self, weather: GradingWeather, rng: random.Random) -> None:
        self._rng = rng
        self._weather = weather
        self._partitions = weather.partitions
        log = msgspec.structs.replace(CONFIGURATION.log, group_partitions=self._partitions)
        self._configuration = msgspec.structs.replace(CONFIGURATION, log=log)
        self._store = StormStore(lambda: rng.uniform(0.0, weather.marker_delay_s))
        self._log = MemoryLog(run=RUN)
        self._log._store = self._store
        self._coordinator = Coordinator()
        self._processes: list[Process] = []
        self._is_over = asyncio.Event()
        self._errors: list[Exception] = []
        self.outcome = Graded()

    async def run(self) -> Graded:
        """Write the script, wait until everything is graded, and check.

        Raises:
            ViolationError: a position went back, grades differ, or nothing goes on.
            Exception: what ended a process and is no fault of the storm's.
        """
        await self._log.create_topics(
            {topic.name: self._partitions for topic in topics.OF_RUN}
            | {topic.dlq_name: 1 for topic in topics.OF_RUN if topic.has_dlq}
        )
        async with asyncio.TaskGroup() as group:
            trimming = group.create_task(self._keep_trimmed())
            for number in range(self._weather.processes):
                group.create_task(self._supervise(0.1 * number))
            await self._write_script()
            await self._wait_until_graded()
            self._is_over.set()
            trimming.cancel()
            for process in self._processes:
                process.stop.set()
        await self._coordinator.close()
        if self._store.went_back:
            self._errors.append(ViolationError(f"positions went back: {self._store.went_back}"))
        if self._errors:
            raise self._errors[0]
        return self.outcome

    async def _supervise(self, wait_s: float) -> None:
        while True:
            await asyncio.sleep(wait_s)
            if self._is_over.is_set():
                return
            wait_s = self._rng.uniform(0.01, 0.5)
            process = Process(
                self._log.open(),
                coordinator=self._coordinator,
                faults=self._weather.faults,
                configuration=self._configuration,
                environ={},
            )
            self._processes.append(process)
            clock_s = asyncio.get_running_loop().time
            try:
                await GradingLoop(process, SETTINGS, clock_s=clock_s).run()
            except Exception as error:  # noqa: BLE001 - the storm's faults, or a defect
                self._errors += [e for e in causes_of(error) if not isinstance(e, _DEATHS)]
                self.outcome.deaths += 1
            finally:
                self._processes.remove(process)
                self.outcome.fenced += process.event_count("grading_fenced")

    async def _write_script(self) -> None:
        writer = await self._log.writer()
        first = self._weather.first_script
        scripts = [
            script(first + number, groups=self._weather.groups)
            for number in range(self._partitions)
        ]
        while any(scripts):
            for number, left in enumerate(scripts):
                burst = left[: self._rng.choice(self._weather.bursts)]
                del left[: len(burst)]
                await writer.write_all([_moved(one, number) for one in burst])
            await asyncio.sleep(self._rng.choice(self._weather.pauses_s))

    async def _wait_until_graded(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + STUCK_S
        while not self._errors and (missing := self._missing()):
            if loop.time() > deadline_s:
                self._errors.append(ViolationError(f"stuck; not graded: {missing}"))
            await asyncio.sleep(_POLL_S)

    def _missing(self) -> list[tuple[int, str]]:
        """Episodes without a grade that need one; partition and id."""
        missing: list[tuple[int, str]] = []
        self.outcome.episodes = self.outcome.grades = 0
        for number in range(self._partitions):
            grades: dict[str, set[bytes]] = defaultdict(set)
            for grade in self._records(topics.GRADED_EPISODES, number):
                assert isinstance(grade, GradedEpisode)
                grades[grade.episode_id].add(msgspec.msgpack.encode(grade))
                self.outcome.grades += 1
                if grade.is_masked:
                    self._errors.append(ViolationError(f"graded without what it needs: {grade}"))
            if differing := [one for one, bodies in grades.items() if len(bodies) > 1]:
                self._errors.append(ViolationError(f"grades differ: {differing}"))
            for episode in self._records(topics.FINISHED_EPISODES, number):
                assert isinstance(episode, FinishedEpisode)
                is_over = int(episode.group_id[2:], 16) in RETIRED
                self.outcome.episodes += 1
                if episode.status == "completed" and not is_over and not grades[episode.episode_id]:
                    missing.append((number, episode.episode_id))
        return missing

    def _records(self, topic: topics.Topic, partition: int) -> Sequence[msgspec.Struct]:
        entries = self._store.all_entries(broker_place(Place(topic.name, partition), run=RUN))
        return [
            topics.decode(topic, entry.record.value)
            for entry in committed_records(entries)
            if entry.record is not None
        ]

    async def _keep_trimmed(self) -> None:
        """Trim what the grading does not need; all other readers are at the ends."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.1, 1.0))
            for group in set(topics.FINISHED_COMPLETIONS.needed_by) - {GROUP}:
                for number in range(self._partitions):
                    place = broker_place(Place(topics.FINISHED_COMPLETIONS.name, number), run=RUN)
                    end = self._store.end_position(place, isolation="committed")
                    self._store.positions[in_run(group, run=RUN), place] = end
            freed = await trim_log(self._log, self._configuration)
            self.outcome.trimmed += sum(freed.values())


def _moved(one: Emit, partition: int) -> Emit:
    return Emit(topic=one.topic, partition=partition, key=one.key, value=one.value)


def run_grading_seed(seed: int) -> Graded:
    """Run the schedule of this seed.

    Raises:
        Exception: a defect; its note says how to run the schedule again.
    """
    rng = random.Random(f"grading {seed}")
    try:
        return run_virtual(GradingSchedule(drawn_weather(rng, first_script=seed), rng).run())
    except Exception as error:
        error.add_note(f"run it again: make storm CASE=grading FIRST={seed} SEEDS=1")
        raise


def run_grading_numbered(processes: int, faults: NumberedFaults) -> Graded:
    """Grade a few episodes with faults at numbered points; nothing else goes wrong."""
    weather = GradingWeather(
        partitions=1,
        processes=processes,
        pauses_s=(0.4,),
        faults=faults,
        marker_delay_s=0.0,
        first_script=0,
        bursts=(6,),
        groups=3,
    )
    return run_virtual(GradingSchedule(weather, random.Random("grading points")).run())
