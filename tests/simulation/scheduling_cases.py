"""Scripts for the scheduler's and the reward service's cores in the crash simulation."""

import random

import msgspec

from forgemq_bus.log import Emit, Record
from forgemq_contracts import topics
from forgemq_contracts.dead_letters import DeadLetter
from forgemq_contracts.groups import AdmittedGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, Trainer
from forgemq_reward.core import RewardCore
from forgemq_scheduler.core import SchedulerCore
from forgemq_shell.dead_letters import dead_letter
from forgemq_shell.records import emit_of
from tests.simulation.harness import CoreCase
from tests.unit.reward.records import finished_episode, graded_episode
from tests.unit.scheduler.scene import Scene

CONFIGURATION = RunConfiguration(
    run="sim",
    seed=0,
    model=Model(path="model"),
    queues=(Queue(domain="d", task_source="", agent="", slots=6, groups_per_step=2, window=3),),
    trainer=Trainer(steps=5),
    log=LogLayout(group_partitions=1),
)
TORN = b"\xc1 torn"


class Recorder(Scene):
    """A scene that keeps the log records it was fed."""

    def __init__(self) -> None:
        super().__init__(CONFIGURATION)
        self.script: list[Emit] = []

    def feed(self, record: msgspec.Struct) -> list[msgspec.Struct]:
        [topic] = [topic for topic in topics.OF_RUN if topic.record is type(record)]
        output = Output(topic=topic.name, partition=0, record=record)
        self.script.append(emit_of(output))
        return super().feed(record)

    def write_dead_letter(self, group_id: str) -> None:
        """Feed a dead letter about this group."""
        topic = topics.GRADED_EPISODES
        bad = Record(
            topic=topic.name,
            partition=0,
            offset=len(self.script),
            timestamp_ms=0,
            key=f"{group_id}.0.0".encode(),
            value=TORN,
        )
        emit = dead_letter(bad, "does not decode")
        self.script.append(emit)
        super().feed(
            DeadLetter(
                topic=topic.name,
                partition=0,
                offset=bad.offset,
                reason="does not decode",
                group=group_id,
            )
        )


def scheduler() -> CoreCase:
    """Five steps of two groups, with failing groups, repeated records and torn records."""
    rng = random.Random(11)
    recorder = Recorder()
    recorder.report()
    recorder.request(100, purpose="eval")
    requested = trained = merged = 0
    while trained < 5:
        if requested - len(recorder.admitted) < 2:
            recorder.request(requested)
            requested += 1
        waiting = [group for group in recorder.admitted[merged:] if group.purpose == "train"]
        if waiting and rng.random() < 0.5:
            recorder.open(int(waiting[0].group_id[2:]), index=rng.randrange(4))
        if waiting and rng.random() < 0.7:
            _merge(recorder, waiting[0], roll=rng.random(), version=trained)
            merged = recorder.admitted.index(waiting[0]) + 1
        if trained < len(recorder.steps) and rng.random() < 0.5:
            recorder.train(trained)
            trained += 1
            recorder.load(version=trained)
        if rng.random() < 0.1:
            recorder.script.append(
                Emit(topic=topics.MERGED_GROUPS.name, partition=0, key=b"?", value=TORN)
            )
        if rng.random() < 0.1:
            recorder.write_dead_letter(rng.choice(recorder.admitted).group_id)
        if rng.random() < 0.2:
            recorder.script.append(rng.choice(recorder.script))
    recorder.merge(100, not_trainable="evaluated", purpose="eval")
    return CoreCase(
        name="scheduler",
        journal=topics.SCHEDULER_JOURNAL,
        make_core=lambda: SchedulerCore(CONFIGURATION),
        script=tuple(recorder.script),
    )


def _merge(recorder: Recorder, group: AdmittedGroup, *, roll: float, version: int) -> None:
    reason = "zero_variance" if roll < 0.2 else ""
    recorder.merge(int(group.group_id[2:]), version=version, not_trainable=reason)


def reward() -> CoreCase:
    """Groups of three in one shuffled stream, with masked episodes, repeats and torn records."""
    rng = random.Random(12)
    records: list[Emit] = []
    for number in range(8):
        group = f"g-{number}"
        for index in range(3):
            status = "failed" if rng.random() < 0.2 else "completed"
            episode = finished_episode(index, group=group, size=3, turns=2, status=status)
            records.append(_emit(topics.FINISHED_EPISODES, episode))
            if status == "completed":
                grade = graded_episode(
                    index, group=group, outcome=rng.random(), process=[rng.random(), 0.0]
                )
                records.append(_emit(topics.GRADED_EPISODES, grade))
    rng.shuffle(records)
    records += rng.sample(records, 10)
    for index, key in ((10, b"g-2.0.1"), (30, b"g-5.1.7"), (40, b"?")):
        torn = Emit(topic=topics.FINISHED_EPISODES.name, partition=0, key=key, value=TORN)
        records.insert(index, torn)
    return CoreCase(
        name="reward",
        journal=topics.REWARD_JOURNAL,
        make_core=lambda: RewardCore(partition=0, rewards=CONFIGURATION.rewards),
        script=tuple(records),
    )


def _emit(topic: topics.Topic, record: msgspec.Struct) -> Emit:
    return emit_of(Output(topic=topic.name, partition=0, record=record))
