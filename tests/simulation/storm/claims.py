"""Groups that agents play, in the storm: gateways, the scheduler and the reward core together.

Gateways come, go, die, stand still and take over from one another; agents vanish, hang and come
late; groups close and expire. `claims_oracle.py` decides what went wrong.
"""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from forgemq_auditor.log_trim import trim_log
from forgemq_bus.errors import FencedError, LogUnavailableError
from forgemq_bus.log import Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.names import broker_place, in_run
from forgemq_contracts import topics
from forgemq_gateway.settings import GatewaySettings
from forgemq_reward import app as reward_app
from forgemq_scheduler import app as scheduler_app
from forgemq_settings.environment import parse
from forgemq_shell.task_plan import TaskPlan
from forgemq_shell.transform import Transform
from forgemq_shell.transform_settings import TransformSettings
from tests.simulation.storm.agents import Agents
from tests.simulation.storm.claimed_world import ClaimedWorld
from tests.simulation.storm.claims_oracle import ClaimsOracle
from tests.simulation.storm.claims_weather import ClaimsWeather, drawn_weather
from tests.simulation.storm.cluster import StormStore
from tests.simulation.storm.faults import Fault, Faults, Point
from tests.simulation.storm.gateway import StormGateway
from tests.simulation.storm.loop import run_virtual
from tests.simulation.storm.membership import Coordinator
from tests.simulation.storm.oracle import Oracle, ViolationError
from tests.simulation.storm.process import KilledError, Process
from tests.simulation.storm.schedule import RUN, STUCK_S, causes_of

_POLL_S = 0.5
_READERS = ("gateway-needed", "scheduler-needed", "scheduler-positions", "reward-positions")
_DEATHS = (KilledError, LogUnavailableError, FencedError)
_ADMIN_KEY = "an-admin-key-of-some-length"


@dataclass(kw_only=True)
class Played:
    """What a schedule went through."""

    groups: int = 0
    episodes: int = 0
    attempts: int = 0
    closed: int = 0
    unclaimed: int = 0
    trained: int = 0
    truncated: int = 0
    rewarded: int = 0
    deaths: int = 0
    owners: int = 0
    left: int = 0
    trimmed: int = 0
    expired: int = 0


class TimedFaults:
    """Faults of another source, and when each of them happened."""

    def __init__(self, faults: Faults, at_s: list[float]) -> None:
        self._faults = faults
        self._at_s = at_s

    def at(self, point: Point) -> Fault | None:
        """The other source's fault."""
        fault = self._faults.at(point)
        if fault is not None:
            self._at_s.append(asyncio.get_running_loop().time())
        return fault


class ClaimsSchedule:
    """One run with its agents; for one use."""

    def __init__(self, weather: ClaimsWeather, rng: random.Random) -> None:
        self._rng = rng
        self._weather = weather
        self._configuration = weather.configuration
        self._store = StormStore(
            lambda: rng.uniform(0.0, weather.marker_delay_s),
            clock_ms=lambda: round(1000 * asyncio.get_running_loop().time()),
        )
        self._log = MemoryLog(run=RUN)
        self._log._store = self._store
        self._environ = weather.environ | {"FORGEMQ_SCHEDULER_TICK_S": "0.5"}
        self._coordinator = Coordinator()
        self._gateways: list[StormGateway] = []
        self._processes: list[Process] = []
        self._faults_s: list[float] = []
        self._gateway_faults = TimedFaults(weather.gateway_faults, self._faults_s)
        self._transform_faults = TimedFaults(weather.transform_faults, self._faults_s)
        self._errors: list[Exception] = []
        self._is_over = asyncio.Event()
        self._transforms = [
            of(self._configuration, self._environ)
            for of in (scheduler_app.transform_of, reward_app.transform_of)
        ]
        self._oracle = ClaimsOracle(self._store, self._configuration, faults_s=self._faults_s)
        self._agents = Agents(
            gateway=self._reachable,
            is_owner=lambda gateway, group: self._oracle.owner_of(group) == gateway.url,
            check_end=self._oracle.check_end,
            rng=rng,
        )
        self.outcome = Played()

    async def run(self) -> Played:
        """Play until the run's last step is trained, and check.

        Raises:
            ViolationError: a record is not as it must be, or nothing goes on.
            Exception: what ended a process and is no fault of the storm's.
        """
        await self._log.create_topics(
            {
                topic.name: topics.partition_count(topic, self._configuration)
                for topic in topics.OF_RUN
            }
            | {topic.dlq_name: 1 for topic in topics.OF_RUN if topic.has_dlq}
        )
        world = ClaimedWorld(
            self._log,
            self._configuration,
            rng=self._rng,
            engine_faults=TimedFaults(self._weather.engine_faults, self._faults_s),
        )
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(self._noted(self._agents.run()))
            beside = [tasks.create_task(each) for each in (world.run(), self._disturb())]
            for transform, count in zip(self._transforms, self._weather.processes, strict=True):
                for number in range(count):
                    tasks.create_task(self._supervise(transform, 0.01 * number))
            tasks.create_task(self._keep_gateway(0.0))
            beside += [
                tasks.create_task(self._keep_gateway(at_s)) for at_s in self._weather.gateways_s
            ]
            await self._wait(playing)
            for task in (playing, *beside):
                task.cancel()
            await self._wait_until_handled()
            await self._wait_until_shared()
            self._is_over.set()
            for process in self._processes:
                process.stop.set()
        await self._coordinator.close()
        if self._errors:
            raise self._errors[0]
        self._check()
        return self.outcome

    async def _noted(self, work: Coroutine[Any, Any, None]) -> None:
        """Run; an error in it is what the schedule found."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._errors += causes_of(error)

    def _reachable(self) -> StormGateway | None:
        """A gateway that lives; agents know none, and come to any."""
        alive = [gateway for gateway in self._gateways if gateway.is_alive]
        return self._rng.choice(alive) if alive else None

    def _at(self, url: str) -> StormGateway | None:
        """The gateway that lives at an address."""
        return next((each for each in self._gateways if each.url == url and each.is_alive), None)

    async def _keep_gateway(self, wait_s: float) -> None:
        """Keep a gateway running from then on, as a launcher does; a further one may leave."""
        is_further = wait_s > 0
        while True:
            await asyncio.sleep(wait_s)
            if self._is_over.is_set():
                return
            wait_s = self._rng.uniform(0.05, 1.0)
            gateway = self._new_gateway()
            leaving = asyncio.ensure_future(self._leave(gateway, is_further=is_further))
            try:
                await gateway.run()
                if not self._is_over.is_set():
                    self.outcome.left += 1
                    return
            except Exception as error:  # noqa: BLE001 - the storm's faults, or a defect
                self._note_death(error)
            finally:
                leaving.cancel()
                self._processes.remove(gateway.process)

    async def _leave(self, gateway: StormGateway, *, is_further: bool) -> None:
        """Tell a gateway to stop after a while, as who scales in does."""
        if is_further and self._rng.random() < 0.5:
            await asyncio.sleep(self._rng.uniform(1.0, 30.0))
            gateway.process.stop.set()

    def _new_gateway(self) -> StormGateway:
        settings = GatewaySettings(
            admin_key=_ADMIN_KEY, drain_s=1.0, mark_every_s=self._rng.choice((0.3, 2.0))
        )
        gateway = StormGateway(
            self._new_process(self._gateway_faults),
            settings,
            url=f"http://gateway-{len(self._gateways)}",
            peer_at=self._at,
        )
        self._gateways.append(gateway)
        return gateway

    def _new_process(self, faults: Faults) -> Process:
        process = Process(
            self._log.open(),
            coordinator=self._coordinator,
            faults=faults,
            configuration=self._configuration,
            environ=self._environ,
        )
        self._processes.append(process)
        return process

    async def _supervise(self, transform: Transform, wait_s: float) -> None:
        while True:
            await asyncio.sleep(wait_s)
            if self._is_over.is_set():
                return
            wait_s = self._rng.uniform(0.01, 0.5)
            process = self._new_process(self._transform_faults)
            try:
                await transform.run(process)
            except Exception as error:  # noqa: BLE001 - the storm's faults, or a defect
                self._note_death(error)
            finally:
                self._processes.remove(process)

    def _note_death(self, error: Exception) -> None:
        self._errors += [each for each in causes_of(error) if not isinstance(each, _DEATHS)]
        self.outcome.deaths += 1

    async def _wait(self, playing: "asyncio.Task[None]") -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + STUCK_S
        while not self._errors and not (playing.done() and self._oracle.is_settled()):
            if loop.time() > deadline_s:
                self._errors.append(ViolationError(f"stuck: {self._oracle.open_groups()}"))
            await asyncio.sleep(_POLL_S)

    async def _wait_until_handled(self) -> None:
        """Wait until the transforms have handled what there is; nobody else writes any more."""
        deadline_s = asyncio.get_running_loop().time() + STUCK_S
        plans = [plan for transform in self._transforms for plan in self._plans(transform)]
        while not self._errors and any(self._unhandled(plan) for plan in plans):
            if asyncio.get_running_loop().time() > deadline_s:
                stuck = [self._unhandled(plan) for plan in plans]
                self._errors.append(ViolationError(f"stuck; not handled: {stuck}"))
            await asyncio.sleep(_POLL_S)

    async def _wait_until_shared(self) -> None:
        """Wait until each partition is served by one gateway, and all have their share."""
        count = self._configuration.log.group_partitions
        deadline_s = asyncio.get_running_loop().time() + STUCK_S
        while not self._errors:
            alive = [gateway for gateway in self._gateways if gateway.is_alive]
            shares = [gateway.serving for gateway in alive]
            served = sorted(number for share in shares for number in share)
            sizes = {len(share) for share in shares}
            if served == list(range(count)) and max(sizes) - min(sizes) <= 1:
                return
            if asyncio.get_running_loop().time() > deadline_s:
                self._errors.append(ViolationError(f"partitions are served as {shares}"))
            await asyncio.sleep(_POLL_S)

    def _unhandled(self, plan: TaskPlan) -> dict[Place, tuple[int, int]]:
        return Oracle(self._log, run=RUN, plan=plan).unhandled()

    def _plans(self, transform: Transform) -> list[TaskPlan]:
        settings = parse(TransformSettings, prefix="FORGEMQ_TRANSFORM_", environ=self._environ)
        return [
            transform.plan(number, configuration=self._configuration, settings=settings)
            for number in range(transform.partitions(self._configuration))
        ]

    def _check(self) -> None:
        for transform in self._transforms:
            for number, plan in enumerate(self._plans(transform)):
                outputs = transform.output_places(number, configuration=self._configuration)
                Oracle(self._log, run=RUN, plan=plan).check(
                    transform.make_core(number), outputs=outputs
                )
        for gateway in self._gateways:
            self._oracle.check_written(gateway.process.answered)
        self._oracle.check(self._agents.heard)
        for name, count in self._oracle.counts().items():
            setattr(self.outcome, name, count)

    async def _disturb(self) -> None:
        """Trim, and forget positions, now and then."""
        if not self._weather.has_trimming:
            return
        has_expiry = self._rng.random() < 0.3
        while self._rng.random() < 0.95:
            await asyncio.sleep(self._rng.uniform(0.5, 5.0))
            self._let_other_readers_pass()
            freed = await trim_log(self._log, self._configuration)
            self.outcome.trimmed += sum(freed.values())
            if has_expiry:
                groups = {in_run(name, run=RUN) for name in _READERS}
                self.outcome.expired += self._store.expire_positions(
                    lambda group, _: group in groups and self._rng.random() < 0.3  # noqa: B023
                )

    def _let_other_readers_pass(self) -> None:
        """Commit the ends for all services that do not run here."""
        for topic in topics.OF_RUN:
            for group in set(topic.needed_by) - set(_READERS):
                for number in range(topics.partition_count(topic, self._configuration)):
                    place = broker_place(Place(topic.name, number), run=RUN)
                    end = self._store.end_position(place, isolation="committed")
                    self._store.positions[in_run(group, run=RUN), place] = end


def run_claims_seed(seed: int) -> Played:
    """Run the schedule of this seed.

    Raises:
        Exception: a defect; its note says how to run the schedule again.
    """
    rng = random.Random(f"claims {seed}")
    try:
        return run_virtual(ClaimsSchedule(drawn_weather(rng), rng).run())
    except Exception as error:
        error.add_note(f"run it again: make storm CASE=claims FIRST={seed} SEEDS=1")
        raise
