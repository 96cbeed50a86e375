"""The scheduler core among agents, gateways, lanes and a trainer that are slow, fail and die.

The world is seeded: a failing seed is the whole reproduction.
"""

import random
from collections import Counter

import msgspec

from forgemq_contracts.groups import (
    AdmittedGroup,
    ClosedGroup,
    MergedGroup,
    RequestedGroup,
    RetiredGroup,
)
from forgemq_contracts.lane_plan import LanePlan, RequestedLane, lanes_limit
from forgemq_contracts.messages import Message, Tick
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_scheduler.core import SchedulerCore
from tests.simulation.lane_world import Calendar, Engines, Gateway, Observer
from tests.unit.scheduler.scene import METRICS, opened_episode

GATEWAYS = 2


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What may go wrong."""

    lanes: bool = False  # late heartbeats; lanes, gateways and schedulers that stop
    plan: bool = False  # lanes that people add, drain, resume and remove
    trainer: bool = False  # restarts from an older checkpoint; trees that do not load


class World:
    """Everything around the core."""

    def __init__(self, seed: int, configuration: RunConfiguration, *, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.configuration = configuration
        self.core = SchedulerCore(configuration)
        self.faults = faults
        self.calendar = Calendar()
        self.engines = Engines(
            self.calendar, self.random, count=lanes_limit(configuration.log), tell=self.tell
        )
        if faults.plan:
            self.engines.follow_plan(lanes=configuration.log.lanes, observer=self.observer)
        self.hearing = self.observer()
        self.plan = self.new_plan()
        self.gateways = [
            Gateway(self.calendar, self.observer(), plan=self.new_plan() if faults.plan else None)
            for _ in range(GATEWAYS)
        ]
        self.lineage = 1
        self.steps: dict[int, ScheduledStep] = {}
        self.next_step = 0
        self.checkpoint_step = -1
        self.is_training = False
        self.admitted: dict[str, AdmittedGroup] = {}
        self.retired: dict[str, RetiredGroup] = {}
        self.closed: set[str] = set()
        self.given: list[msgspec.Struct] = []
        self.requested = 0
        self.waiting = Counter[str]()
        self.has_ended = False
        self.changes = 0

    def new_plan(self) -> LanePlan:
        layout = self.configuration.log
        return LanePlan(lanes=layout.lanes, lanes_max=lanes_limit(layout))

    def observer(self) -> Observer:
        return Observer(self.calendar, self.random, is_late=self.faults.lanes)

    def run(self, *, until_s: int) -> None:
        self.engines.start()
        self.calendar.after(0, self.tick)
        self.calendar.run(until_ms=until_s * 1000, is_over=self.is_over)

    def is_over(self) -> bool:
        return self.has_ended and self.admitted.keys() == self.retired.keys()

    # The scheduler.

    def tell(self, record: ReportedEngine | LoadedWeights) -> None:
        """A lane wrote a record; each observer reads it in its own time."""
        partition = f"{type(record).__name__} {record.lane}"
        self.hearing.hear(partition, lambda: self.give(record))
        if isinstance(record, ReportedEngine):
            for gateway in self.gateways:
                gateway.hear(record)

    def give(self, record: msgspec.Struct) -> None:
        self.given.append(record)
        self.deliver(record)
        if self.random.random() < 0.05:  # a redelivered record changes nothing
            self.deliver(self.random.choice(self.given[-200:]))

    def deliver(self, record: msgspec.Struct) -> None:
        self.handle(Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record))

    def handle(self, event: Message | Tick) -> None:
        outputs = self.core.handle(event)
        self.core._check()
        written = len(outputs)
        self.core._advance()
        assert len(self.core._outputs) == written, "a second look decides nothing more"
        for output in outputs:
            match output.record:
                case AdmittedGroup() as admitted:
                    self.on_admitted(admitted)
                case ClosedGroup() as closed:
                    self.on_closed(closed)
                case RetiredGroup() as retired:
                    assert retired.group_id in self.admitted, "retired before admitted"
                    assert retired.group_id not in self.retired, "retired twice"
                    self.retired[retired.group_id] = retired
                case ScheduledStep() as step:
                    assert step.step == len(self.steps), "steps come in order"
                    self.steps[step.step] = step
                    self.train()

    def tick(self) -> None:
        self.handle(Tick(run_ms=self.calendar.now_ms))
        for queue in self.configuration.queues:
            while self.waiting[queue.domain] < 3 and not self.has_ended:
                self.request(queue.domain)
        if self.faults.lanes:
            self.break_something()
        if self.faults.plan and (not self.changes or self.random.random() < 0.1):
            self.change_lanes()
        if self.faults.trainer and self.random.random() < 0.01:
            self.restart_trainer()
        self.calendar.after(1000, self.tick)

    def break_something(self) -> None:
        if self.random.random() < 0.03:
            restarted = SchedulerCore(self.configuration)
            restarted.restore(self.core.snapshot())
            assert restarted.snapshot() == self.core.snapshot()
            self.core = restarted
        if self.random.random() < 0.02:
            self.engines.die(self.random.choice(self.engines.lanes))
        if self.random.random() < 0.03:
            self.engines.fall_silent(self.random.choice(self.engines.lanes))
        if self.random.random() < 0.02:
            self.random.choice(self.gateways).restart()

    def change_lanes(self) -> None:
        """Write a change of the plan; now and then one that cannot hold."""
        change = RequestedLane(
            lane=self.random.randrange(lanes_limit(self.configuration.log)),
            change=self.random.choice(("add", "add", "drain", "resume", "remove")),
            change_id="0" * 32,
            requested_ms=self.calendar.now_ms,
        )
        self.changes += not self.plan.apply(change)
        self.engines.change(change)
        for gateway in self.gateways:
            gateway.hear_change(change)

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
        self.admitted[admitted.group_id] = admitted
        if admitted.purpose == "train":
            self.waiting[admitted.domain] -= 1
        if self.random.random() < 0.02:
            return  # nobody ever claims it: only the deadline of that name ends it
        gateway = self.random.choice(self.gateways)
        turns = self.random.randint(1, 3)

        def claim() -> None:
            for index in range(admitted.group_size):
                self.give(opened_episode(admitted.group_id, index=index))
            self.play(admitted, gateway, turns=turns)

        gateway.admit(admitted, then=claim)

    def on_closed(self, closed: ClosedGroup) -> None:
        """The gateway ends what is unfinished; mostly the group is then scored and merged."""
        assert closed.group_id not in self.closed, "closed twice"
        assert closed.group_id not in self.retired, "closed when it is over"
        self.closed.add(closed.group_id)
        if self.random.random() < 0.8:
            admitted = self.admitted[closed.group_id]
            version = admitted.version_at_admission

            def merge() -> None:
                self.merge(admitted, version=version)

            self.calendar.after(self.random.randrange(100, 5000), merge)

    def play(
        self,
        admitted: AdmittedGroup,
        gateway: Gateway,
        *,
        turns: int,
        versions: tuple[int, ...] = (),
    ) -> None:
        """Ask for the next completion of the group, until it has them all."""
        if len(versions) == turns:
            self.merge(admitted, version=min(versions))
            return
        if self.random.random() < 0.01:
            return  # hangs: only the deadline ends it

        def ask() -> None:
            lane = gateway.choose()
            if lane is None:
                self.calendar.after(1000, ask)
                return
            gateway.lanes.enter(lane.lane, lane.epoch)
            self.engines.sample(lane, then=answered, lost=ask)

        def answered(version: int) -> None:
            self.play(admitted, gateway, turns=turns, versions=(*versions, version))

        ask()

    def merge(self, admitted: AdmittedGroup, *, version: int) -> None:
        if not self.faults.trainer:
            assert version >= admitted.version_at_admission, "a token older than its admission"
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

    # The trainer.

    def train(self) -> None:
        if self.is_training or self.next_step not in self.steps:
            return
        self.is_training = True
        lineage, step = self.lineage, self.steps[self.next_step]

        def finish() -> None:
            if lineage == self.lineage:
                self.finish_step(step)

        self.calendar.after(self.random.randrange(100, 6000), finish)

    def finish_step(self, step: ScheduledStep) -> None:
        """Publish the step's weights, and record it once it is saved; a crash may come between."""
        lineage = self.lineage
        self.engines.published = (lineage, step.step + 1)

        def record() -> None:
            if lineage == self.lineage:
                self.record_step(step)

        self.calendar.after(self.random.randrange(3000), record)

    def record_step(self, step: ScheduledStep) -> None:
        ids = [group.group_id for group in step.groups]
        lost = [ids.pop()] if self.faults.trainer and self.random.random() < 0.1 else []
        if step.step % 2 == 1:
            self.checkpoint_step = step.step
        self.is_training = False
        self.next_step = step.step + 1
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
            self.engines.published = (self.lineage, self.next_step)
            self.is_training = False
            self.train()
