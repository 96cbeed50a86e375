"""The scheduler core in a world of agents, engines and a trainer that are slow, fail and die.

The world is seeded: a failing seed is the whole reproduction.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from forgemq_contracts.groups import AdmittedGroup, MergedGroup, RequestedGroup, RetiredGroup
from forgemq_contracts.messages import Message, Tick
from forgemq_contracts.run import (
    Log,
    Model,
    Queue,
    RunConfiguration,
    Trainer,
    check,
    staleness_bound,
)
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_scheduler.core import SchedulerCore
from tests.unit.scheduler.scene import METRICS


def configuration_of(
    *, queues: list[tuple[int, int, int]], steps: int, ahead: int = 1, lanes: int = 1
) -> RunConfiguration:
    """A run with these queues (N, P, W) and a head deadline of 60 s."""
    configuration = RunConfiguration(
        run="sim",
        seed=0,
        model=Model(path="model"),
        queues=tuple(
            Queue(
                domain=f"d{number}",
                task_source="",
                agent="",
                slots=slots,
                groups_per_step=groups,
                window=window,
                group_deadline_s=60.0,
            )
            for number, (slots, groups, window) in enumerate(queues)
        ),
        trainer=Trainer(steps=steps, steps_ahead_max=ahead),
        log=Log(group_partitions=4, lanes=lanes),
    )
    check(configuration)
    return configuration


class Lane(msgspec.Struct):
    number: int
    epoch: int = 0
    is_alive: bool = True
    weights: tuple[int, int] = (0, 0)


class World:
    """Everything around the core; time is virtual milliseconds."""

    def __init__(self, seed: int, configuration: RunConfiguration, *, faults: bool) -> None:
        self.random = random.Random(seed)
        self.configuration = configuration
        self.core = SchedulerCore(configuration)
        self.has_faults = faults
        self.now_ms = 0
        self.calendar: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0
        self.lanes = [Lane(number=n) for n in range(configuration.log.lanes)]
        self.loaded_everywhere = (0, 0)
        self.lineage = 1
        self.published = (1, 0)
        self.steps: dict[int, ScheduledStep] = {}
        self.next_step = 0
        self.checkpoint_step = -1
        self.is_training = False
        self.admitted: dict[str, AdmittedGroup] = {}
        self.retired: dict[str, RetiredGroup] = {}
        self.history: list[msgspec.Struct] = []
        self.requested = 0
        self.waiting = Counter[str]()
        self.has_ended = False

    # The calendar.

    def after(self, delay_ms: int, happen: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.calendar, (self.now_ms + delay_ms, self.count, happen))

    def run(self, *, until_s: int) -> None:
        for lane in self.lanes:
            self.after(self.random.randrange(3000), lambda lane=lane: self.heartbeat(lane))
            self.after(self.random.randrange(5000), lambda lane=lane: self.load(lane))
        self.after(0, self.tick)
        while self.calendar and self.calendar[0][0] <= until_s * 1000 and not self.is_over():
            self.now_ms, _, happen = heapq.heappop(self.calendar)
            happen()

    def is_over(self) -> bool:
        return self.has_ended and self.admitted.keys() == self.retired.keys()

    # The scheduler.

    def give(self, record: msgspec.Struct) -> None:
        self.history.append(record)
        self.deliver(record)
        if self.random.random() < 0.05:  # a redelivered record changes nothing
            self.deliver(self.random.choice(self.history[-200:]))

    def deliver(self, record: msgspec.Struct) -> None:
        self.handle(Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record))

    def handle(self, event: Message | Tick) -> None:
        outputs = self.core.handle(event)
        self.core._check()
        for output in outputs:
            match output.record:
                case AdmittedGroup() as admitted:
                    self.on_admitted(admitted)
                case RetiredGroup() as retired:
                    assert retired.group_id in self.admitted, "retired before admitted"
                    assert retired.group_id not in self.retired, "retired twice"
                    self.retired[retired.group_id] = retired
                case ScheduledStep() as step:
                    assert step.step == len(self.steps), "steps come in order"
                    self.steps[step.step] = step
                    self.train()

    def tick(self) -> None:
        self.handle(Tick(run_ms=self.now_ms))
        for queue in self.configuration.queues:
            while self.waiting[queue.domain] < 3 and not self.has_ended:
                self.request(queue.domain)
        if self.has_faults and self.random.random() < 0.03:
            restarted = SchedulerCore(self.configuration)
            restarted.restore(self.core.snapshot())
            assert restarted.snapshot() == self.core.snapshot()
            self.core = restarted
        if self.has_faults and self.random.random() < 0.02:
            self.die(self.random.choice(self.lanes))
        if self.has_faults and self.random.random() < 0.01:
            self.restart_trainer()
        self.after(1000, self.tick)

    # Agents, grading and merging.

    def request(self, domain: str) -> None:
        purpose = "eval" if self.random.random() < 0.1 else "train"
        self.requested += 1
        if purpose == "train":
            self.waiting[domain] += 1
        self.give(
            RequestedGroup(
                group_id=f"g-{self.requested}",
                domain=domain,
                purpose=purpose,
                group_size=4,
                task=b"{}",
                idempotency_key=str(self.requested),
                requested_ms=0,
            )
        )

    def on_admitted(self, admitted: AdmittedGroup) -> None:
        assert admitted.group_id not in self.admitted, "admitted twice"
        assert any(lane.is_alive for lane in self.lanes) or self.has_faults
        self.admitted[admitted.group_id] = admitted
        if admitted.purpose == "train":
            self.waiting[admitted.domain] -= 1
        self.after(self.random.randrange(2000), lambda: self.generate(admitted))

    def generate(self, admitted: AdmittedGroup) -> None:
        if self.random.random() < 0.02:
            return  # hangs: only the deadline ends it
        eligible = [lane for lane in self.lanes if self.takes_requests(lane)]
        if not eligible:
            self.after(1000, lambda: self.generate(admitted))
            return
        lane = self.random.choice(eligible)
        epoch, version = lane.epoch, lane.weights[1]
        slow = 40_000 if self.random.random() < 0.1 else 8000

        def finish() -> None:
            if lane.epoch != epoch or not lane.is_alive:
                self.generate(admitted)  # what the old epoch held is sent again
            else:
                self.merge(admitted, version=version)

        self.after(self.random.randrange(100, slow), finish)

    def merge(self, admitted: AdmittedGroup, *, version: int) -> None:
        roll = self.random.random()
        not_trainable = "zero_variance" if roll < 0.15 else "failed" if roll < 0.2 else ""
        if admitted.purpose == "eval":
            not_trainable = "evaluated"
        self.give(
            MergedGroup(
                group_id=admitted.group_id,
                domain=admitted.domain,
                purpose=admitted.purpose,
                partition=0,
                tree_sha256=None if not_trainable else "0" * 64,
                version_min=version,
                not_trainable=not_trainable,
            )
        )

    # Engines.

    def takes_requests(self, lane: Lane) -> bool:
        return lane.is_alive and lane.weights >= self.loaded_everywhere

    def heartbeat(self, lane: Lane) -> None:
        if lane.is_alive:
            self.give(
                ReportedEngine(
                    lane=lane.number,
                    epoch=lane.epoch,
                    url="",
                    is_serving=True,
                    lineage=lane.weights[0],
                    version=lane.weights[1],
                    running=0,
                    queued=0,
                    reported_ms=0,
                )
            )
            lowest = min(other.weights for other in self.lanes if other.is_alive)
            self.loaded_everywhere = max(self.loaded_everywhere, lowest)
        self.after(1000, lambda: self.heartbeat(lane))

    def load(self, lane: Lane) -> None:
        if lane.is_alive and lane.weights < self.published:
            lane.weights = self.published
            self.give(
                LoadedWeights(
                    lane=lane.number,
                    epoch=lane.epoch,
                    lineage=lane.weights[0],
                    version=lane.weights[1],
                    path="fast",
                    duration_s=0.0,
                )
            )
        self.after(self.random.randrange(100, 4000), lambda: self.load(lane))

    def die(self, lane: Lane) -> None:
        def start() -> None:
            lane.is_alive, lane.epoch, lane.weights = True, lane.epoch + 1, (0, 0)

        if lane.is_alive:
            lane.is_alive = False
            self.after(self.random.randrange(1000, 30_000), start)

    # The trainer.

    def train(self) -> None:
        if self.is_training or self.next_step not in self.steps:
            return
        self.is_training = True
        lineage, step = self.lineage, self.steps[self.next_step]

        def finish() -> None:
            if lineage == self.lineage:
                self.finish_step(step)

        self.after(self.random.randrange(100, 6000), finish)

    def finish_step(self, step: ScheduledStep) -> None:
        ids = [group.group_id for group in step.groups]
        lost = [ids.pop()] if self.has_faults and self.random.random() < 0.1 else []
        if step.step % 2 == 1:
            self.checkpoint_step = step.step
        self.is_training = False
        self.next_step = step.step + 1
        self.published = (self.lineage, self.next_step)
        self.has_ended = step.is_last
        self.give(
            TrainedStep(
                step=step.step,
                lineage=self.lineage,
                group_ids=tuple(ids),
                failed_group_ids=tuple(lost),
                metrics=METRICS,
                checkpoint_step=self.checkpoint_step,
                duration_s=0.0,
                is_last=step.is_last,
            )
        )
        self.train()

    def restart_trainer(self) -> None:
        if not self.has_ended:
            self.lineage += 1
            self.next_step = self.checkpoint_step + 1
            self.published = (self.lineage, self.next_step)
            self.is_training = False
            self.train()


def assert_accounts_balance(world: World) -> None:
    """G1, full steps in every queue, G3."""
    assert world.has_ended, f"stalled after {len(world.steps)} steps"
    assert world.admitted.keys() == world.retired.keys()
    for step in world.steps.values():
        domains = Counter(group.domain for group in step.groups)
        for queue in world.configuration.queues:
            assert domains[queue.domain] == queue.groups_per_step
            assert all(
                step.step - group.version_min <= staleness_bound(queue)
                for group in step.groups
                if group.domain == queue.domain
            )
    trained = [r.group_id for r in world.retired.values() if r.reason == "trained"]
    taken = [group.group_id for step in world.steps.values() for group in step.groups]
    assert len(set(taken)) == len(taken), "a group trains in one step only"
    assert set(trained) <= set(taken)


def shape_of(seed: int) -> RunConfiguration:
    """A run drawn from the seed: one or two queues, N from P up, W from 1 to N."""
    shape = random.Random(f"shape {seed}")
    queues = []
    for _ in range(shape.choice((1, 1, 2))):
        groups = shape.randint(1, 6)
        slots = groups * shape.randint(1, 2) + shape.randint(0, 5)
        queues.append((slots, groups, shape.randint(1, slots)))
    return configuration_of(
        queues=queues,
        steps=shape.randint(3, 12),
        ahead=shape.randint(0, 2),
        lanes=shape.randint(1, 3),
    )


@pytest.mark.simulation
@pytest.mark.parametrize("seed", range(60))
def test_every_group_retires_once_and_every_step_is_full_whatever_dies(seed: int) -> None:
    world = World(seed, shape_of(seed), faults=True)
    world.run(until_s=20_000)
    assert_accounts_balance(world)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", range(60))
def test_without_a_trainer_restart_the_bound_holds_by_itself(seed: int) -> None:
    """No group is ever stale, so G3 does not come from throwing stale groups away."""
    world = World(seed, shape_of(seed), faults=False)
    world.run(until_s=20_000)
    assert_accounts_balance(world)
    assert Counter(r.reason for r in world.retired.values())["stale"] == 0


@pytest.mark.simulation
@pytest.mark.parametrize("slots", [6, 12])
def test_the_demo_never_stalls(slots: int) -> None:
    """N=12, W=4, P=6 with one step ahead, and N = P."""
    configuration = configuration_of(queues=[(slots, 6, 4)], steps=40)
    world = World(7, configuration, faults=True)
    world.run(until_s=20_000)
    assert_accounts_balance(world)
