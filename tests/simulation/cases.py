"""Every core that the crash simulation and the replay tests run; a new core adds its case here."""

import random
from collections.abc import Iterable

import msgspec

from forgemq_bus.log import Emit
from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import FinishedCompletion, TurnPart, WeightSpan
from forgemq_contracts.episodes import FinishedEpisode, GradedEpisode, ManifestEntry
from forgemq_contracts.groups import (
    EpisodeScore,
    MergedGroup,
    RequestedGroup,
    RetiredGroup,
    ScoredCompletion,
    ScoredGroup,
)
from forgemq_contracts.messages import Message, Output
from forgemq_contracts.run import LogLayout, Model, Queue, Rewards, RunConfiguration, Trainer
from forgemq_contracts.steps import ScheduledStep, TrainedStep, TrainingMetrics
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_merger.core.merger import MergerCore
from forgemq_reward.core import RewardCore
from forgemq_scheduler.core import SchedulerCore
from forgemq_shell.records import emit_of
from tests.simulation.counting_core import CountingCore
from tests.simulation.harness import CoreCase

GROUPS = 12
EPISODES = 3
TURNS = 2
CONFIGURATION = RunConfiguration(
    run="sim",
    seed=0,
    model=Model(path="model"),
    queues=(Queue(domain="d", task_source="", agent="", slots=4, groups_per_step=2, window=3),),
    trainer=Trainer(steps=4),
    log=LogLayout(group_partitions=1, lanes=1),
)


def emit(topic: topics.Topic, record: msgspec.Struct) -> Emit:
    return emit_of(Output(topic=topic.name, partition=0, record=record))


def torn(topic: topics.Topic, key: str) -> Emit:
    """A record that does not decode."""
    return Emit(topic=topic.name, partition=0, key=key.encode(), value=b"\xc1 torn")


def group_id(group: int) -> str:
    return f"g-{group:x}"


def completion_id(group: int, index: int, turn: int) -> str:
    return f"{(group << 64) + (index << 32) + turn + 1:032x}"


def shuffled_keeping_order(streams: list[list[Emit]], seed: int) -> tuple[Emit, ...]:
    """One of the orders in which records of these streams can be read."""
    rng, left = random.Random(seed), [list(reversed(stream)) for stream in streams if stream]
    order: list[Emit] = []
    while left:
        stream = rng.choice(left)
        order.append(stream.pop())
        left = [stream for stream in left if stream]
    return tuple(order)


def counting() -> CoreCase:
    """Scored groups in random order; some groups are retired before, some records do not decode."""
    rng = random.Random(7)
    script: list[Emit] = []
    for number in range(60):
        group = rng.randrange(GROUPS)
        if rng.random() < 0.1:
            script.append(torn(topics.SCORED_GROUPS, "?"))
        if rng.random() < 0.1:
            script.append(emit(topics.RETIRED_GROUPS, retired(group)))
        script.append(
            emit(
                topics.SCORED_GROUPS,
                ScoredGroup(
                    group_id=group_id(group),
                    domain="d",
                    purpose="train",
                    episodes=(),
                    detail=str(number),
                ),
            )
        )
    return CoreCase(
        name="merger",
        journal=topics.MERGER_JOURNAL,
        make_core=CountingCore,
        script=tuple(script),
    )


def reward() -> CoreCase:
    """Episodes and their grades in random order; one grade does not decode."""
    episodes, grades = [], []
    for group in range(GROUPS):
        for index in range(EPISODES):
            episodes.append(emit(topics.FINISHED_EPISODES, finished_episode(group, index)))
            grade = graded_episode(group, index)
            is_torn = (group, index) == (5, 1)
            grades.append(
                torn(topics.GRADED_EPISODES, grade.episode_id)
                if is_torn
                else emit(topics.GRADED_EPISODES, grade)
            )
    ends = [emit(topics.RETIRED_GROUPS, retired(group)) for group in (2, 7)]
    return CoreCase(
        name="reward",
        journal=topics.REWARD_JOURNAL,
        make_core=lambda: RewardCore(partition=0, rewards=Rewards()),
        script=shuffled_keeping_order([episodes, grades, ends], seed=3),
    )


def merger() -> CoreCase:
    """Completions, scored groups that name them, and retired groups, in random order."""
    completions = [
        (group, index, turn)
        for group in range(GROUPS)
        for index in range(EPISODES)
        for turn in range(TURNS)
    ]
    offsets = {completion: offset for offset, completion in enumerate(completions)}
    return CoreCase(
        name="merger",
        journal=topics.MERGER_JOURNAL,
        make_core=lambda: MergerCore(0),
        script=shuffled_keeping_order(
            [
                [
                    emit(topics.FINISHED_COMPLETIONS, finished_completion(*completion))
                    for completion in completions
                ],
                [
                    emit(topics.SCORED_GROUPS, scored_group(group, offsets))
                    for group in range(GROUPS)
                ],
                [emit(topics.RETIRED_GROUPS, retired(group)) for group in (1, 6)],
            ],
            seed=5,
        ),
    )


def scheduler() -> CoreCase:
    """Requests, merged groups, steps and loaded weights, in the order of a run."""
    core = SchedulerCore(CONFIGURATION)
    script = [emit(topics.REPORTED_ENGINES, report(version=0))]
    script += [emit(topics.REQUESTED_GROUPS, requested(group)) for group in range(GROUPS)]
    script += [emit(topics.MERGED_GROUPS, merged(group)) for group in (1, 0, 3, 2)]
    waiting = scheduled_by(core, script)
    later = iter(range(4, GROUPS))
    for _ in range(CONFIGURATION.trainer.steps):
        if not waiting:
            break
        step = waiting.pop(0)
        answers = [
            emit(topics.TRAINED_STEPS, trained(step)),
            emit(topics.LOADED_WEIGHTS, loaded(step.step + 1)),
            emit(topics.REPORTED_ENGINES, report(version=step.step + 1)),
        ]
        answers += [
            emit(topics.MERGED_GROUPS, merged(group, version=step.step))
            for _, group in zip(range(2), later, strict=False)
        ]
        waiting += scheduled_by(core, answers)
        script += answers
    assert len([e for e in script if e.topic == topics.TRAINED_STEPS.name]) >= 3
    return CoreCase(
        name="scheduler",
        journal=topics.SCHEDULER_JOURNAL,
        make_core=lambda: SchedulerCore(CONFIGURATION),
        script=tuple(script),
    )


def scheduled_by(core: SchedulerCore, emits: Iterable[Emit]) -> list[ScheduledStep]:
    """Steps that the core schedules after these records."""
    outputs = []
    for item in emits:
        record = topics.decode(topics.BY_NAME[item.topic], item.value)
        outputs += core.handle(
            Message(topic=item.topic, partition=0, offset=0, timestamp_ms=0, record=record)
        )
    return [output.record for output in outputs if isinstance(output.record, ScheduledStep)]


def retired(group: int) -> RetiredGroup:
    return RetiredGroup(group_id=group_id(group), domain="d", purpose="train", reason="cancelled")


def finished_episode(group: int, index: int) -> FinishedEpisode:
    return FinishedEpisode(
        episode_id=f"{group_id(group)}.{index}.0",
        group_id=group_id(group),
        domain="d",
        purpose="train",
        group_size=EPISODES,
        index=index,
        attempt=0,
        status="failed" if (group, index) == (3, 2) else "completed",
        manifest=tuple(
            ManifestEntry(
                completion_id=completion_id(group, index, turn),
                offset=(group * EPISODES + index) * TURNS + turn,
                sequence=turn,
                output_tokens=3,
            )
            for turn in range(TURNS)
        ),
        task=b"{}",
    )


def graded_episode(group: int, index: int) -> GradedEpisode:
    return GradedEpisode(
        episode_id=f"{group_id(group)}.{index}.0",
        group_id=group_id(group),
        grader="test:outcome",
        grader_version="1",
        # Group 4 has no variance.
        outcome=1.0 if group == 4 else float((group * 7 + index) % 3),
        speed=0.0 if group == 4 else index / 10,
        is_masked=(group, index) == (3, 2),
    )


def finished_completion(group: int, index: int, turn: int) -> FinishedCompletion:
    prompt = [10, 11, 12 + group]
    earlier = [20 + index + n for n in range(3)]
    return FinishedCompletion(
        request_id=completion_id(group, index, turn),
        attempt=0,
        episode_id=f"{group_id(group)}.{index}.0",
        group_id=group_id(group),
        lane=0,
        epoch=0,
        finish_reason="stop",
        turn=TurnPart(sequence=turn, protocol="chat_completions", body_digest="b"),
        parent_id=completion_id(group, index, 0) if turn else None,
        shared_prefix_tokens=len(prompt) + len(earlier) if turn else 0,
        context=pack_ids([30, 31] if turn else prompt),
        output=pack_ids([40 + index + n for n in range(2)] if turn else earlier),
        logprobs=pack_floats([-0.25 * (n + 1) for n in range(2 if turn else 3)]),
        spans=(WeightSpan(start=0, end=2 if turn else 3, lineage=1, version=group % 3),),
    )


def scored_group(group: int, offsets: dict[tuple[int, int, int], int]) -> ScoredGroup:
    return ScoredGroup(
        group_id=group_id(group),
        domain="d",
        purpose="train",
        episodes=tuple(
            EpisodeScore(
                episode_id=f"{group_id(group)}.{index}.0", outcome=1, speed=0, process=0, total=1
            )
            for index in range(EPISODES)
        ),
        completions=tuple(
            ScoredCompletion(
                completion_id=completion_id(group, index, turn),
                offset=offsets[group, index, turn],
                episode_index=index,
                sequence=turn,
                return_to_go=1.0,
                advantage=index - 1.0,
            )
            for index in range(EPISODES)
            for turn in range(TURNS)
        ),
        not_trainable="failed" if group == 8 else "",
    )


def requested(group: int) -> RequestedGroup:
    return RequestedGroup(
        group_id=group_id(group),
        domain="d",
        purpose="train",
        group_size=EPISODES,
        task=b"{}",
        idempotency_key=str(group),
        requested_ms=0,
    )


def merged(group: int, *, version: int = 0) -> MergedGroup:
    return MergedGroup(
        group_id=group_id(group),
        domain="d",
        purpose="train",
        partition=0,
        tree_sha256=f"{group:064x}",
        tree_tokens=10 + group,
        loss_tokens=4,
        version_min=version,
    )


def report(*, version: int) -> ReportedEngine:
    return ReportedEngine(
        lane=0,
        epoch=0,
        url="",
        is_serving=True,
        lineage=1,
        version=version,
        running=0,
        queued=0,
        reported_ms=0,
    )


def loaded(version: int) -> LoadedWeights:
    return LoadedWeights(lane=0, epoch=0, lineage=1, version=version, path="fast", duration_s=0.0)


def trained(step: ScheduledStep) -> TrainedStep:
    zeros = {field.name: 0 for field in msgspec.structs.fields(TrainingMetrics) if field.required}
    return TrainedStep(
        step=step.step,
        lineage=1,
        group_ids=tuple(group.group_id for group in step.groups),
        failed_group_ids=(),
        metrics=msgspec.convert(zeros, TrainingMetrics),
        checkpoint_step=step.step,
        duration_s=0.0,
    )


CASES = (counting, reward, merger, scheduler)
