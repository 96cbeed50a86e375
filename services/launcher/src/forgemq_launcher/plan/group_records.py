"""The records of a planned group, and of a planned step, besides those of its episodes."""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from forgemq_contracts import topics
from forgemq_contracts.audit import AuditedGroup, TreeFacts
from forgemq_contracts.gaps import LogprobGap
from forgemq_contracts.groups import (
    AdmittedGroup,
    EpisodeScore,
    MergedGroup,
    RequestedGroup,
    RetiredGroup,
    ScoredCompletion,
    ScoredGroup,
)
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledGroup, ScheduledStep, TrainedStep, TrainingMetrics
from forgemq_contracts.topic import Topic
from forgemq_contracts.trees import MergedTree
from forgemq_contracts.weights import LoadedWeights, PublishedHead, PublishedWeights
from forgemq_launcher.plan.episode_records import (
    EPISODE_ID,
    GROUP_ID,
    NOW_MS,
    OFFSET,
    SHA256,
    PlannedQueue,
    request_id,
    task_of,
)
from forgemq_launcher.plan.group_trees import usual_tree

VERSION = 100
"""Of weights, and the step; as long as those of the most steps."""


def group_records(planned: PlannedQueue) -> Iterator[tuple[Topic, Struct]]:
    """The records of one group, without those of its episodes."""
    queue, shape = planned.queue, planned.shape
    task, domain = task_of(shape), queue.domain
    yield (
        topics.REQUESTED_GROUPS,
        RequestedGroup(
            group_id=GROUP_ID,
            domain=domain,
            purpose="train",
            group_size=queue.group_size,
            task=task,
            idempotency_key=f"train/{domain}/{OFFSET}",
            requested_ms=NOW_MS,
        ),
    )
    yield (
        topics.ADMITTED_GROUPS,
        AdmittedGroup(
            group_id=GROUP_ID,
            domain=domain,
            purpose="train",
            group_size=queue.group_size,
            task=task,
            version_at_admission=VERSION,
            queue_index=OFFSET,
            lineage_at_admission=1,
        ),
    )
    yield topics.SCORED_GROUPS, _scored(planned)
    tree = usual_tree(shape, episodes=queue.group_size, routes=planned.routes)
    tree = msgspec.structs.replace(tree, group_id=GROUP_ID, domain=domain)
    yield topics.MERGED_TREES, tree
    yield topics.MERGED_GROUPS, _merged(planned, tree)
    retired = RetiredGroup(
        group_id=GROUP_ID,
        domain=domain,
        purpose="train",
        reason="trained",
        queue_index=OFFSET,
        step=VERSION,
    )
    yield topics.RETIRED_GROUPS, retired
    yield topics.AUDITED_GROUPS, _audited(tree, planned)


def _scored(planned: PlannedQueue) -> ScoredGroup:
    queue, shape = planned.queue, planned.shape
    score = EpisodeScore(episode_id=EPISODE_ID, outcome=1.0, speed=0.5, process=0.5, total=1.5)
    completions = [
        ScoredCompletion(
            completion_id=request_id(turn),
            offset=OFFSET,
            episode_index=index,
            sequence=turn,
            return_to_go=1.5,
            advantage=0.5,
            parent_id=request_id(turn - 1) if turn else None,
        )
        for index in range(queue.group_size)
        for turn in range(shape.turns)
    ]
    return ScoredGroup(
        group_id=GROUP_ID,
        domain=queue.domain,
        purpose="train",
        episodes=(score,) * queue.group_size,
        completions=tuple(completions),
    )


def _merged(planned: PlannedQueue, tree: MergedTree) -> MergedGroup:
    queue, shape = planned.queue, planned.shape
    return MergedGroup(
        group_id=GROUP_ID,
        domain=queue.domain,
        purpose="train",
        partition=1,
        tree_sha256=SHA256,
        tree_tokens=len(tree.tokens) // 4,
        loss_tokens=len(tree.entry_token) // 4,
        attention_pairs=_pairs(planned),
        request_tokens=queue.group_size * shape.turns * shape.tokens,
        append_tokens=queue.group_size * shape.tokens,
        version_min=VERSION,
        scored=queue.group_size,
        solved=queue.group_size,
    )


def _pairs(planned: PlannedQueue) -> int:
    """About as many as the tree's attention visits; only the length of the number counts."""
    return planned.queue.group_size * planned.shape.tokens**2


def _audited(tree: MergedTree, planned: PlannedQueue) -> AuditedGroup:
    entries = len(tree.entry_token) // 4
    facts = TreeFacts(
        group_id=GROUP_ID,
        sha256=SHA256,
        completion_ids=tree.sample_ids,
        entries=entries,
        version_min=VERSION,
        request_pairs=_pairs(planned),
    )
    return AuditedGroup(
        group_id=GROUP_ID,
        completions=len(tree.sample_ids),
        output_tokens=entries,
        version_min=VERSION,
        version_max=VERSION,
        trees=(facts,),
    )


def step_records(
    planned: Sequence[PlannedQueue],
    configuration: RunConfiguration,
    *,
    weights_bytes: int,
    head_bytes: int,
) -> Iterator[tuple[Topic, Struct]]:
    """The records of one step, besides those of its groups.

    Args:
        planned: The queues.
        configuration: Of the run.
        weights_bytes: Of the version that the step publishes.
        head_bytes: Of the draft head that it is published with; 0 without one.
    """
    groups = [group for each in planned for group in [_scheduled(each)] * _groups(each)]
    yield (
        topics.SCHEDULED_STEPS,
        ScheduledStep(step=VERSION, groups=tuple(groups), staleness_bound=2),
    )
    yield topics.TRAINED_STEPS, _trained(len(groups))
    blobs = f"file:///runs/{configuration.run}/blobs/weights/{configuration.run}"
    head_uri = f"{blobs}/heads/1.{VERSION}"
    published = PublishedWeights(
        lineage=1,
        version=VERSION + 1,
        sha256=SHA256,
        uri=f"{blobs}/1.{VERSION}",
        size_bytes=weights_bytes,
        head=PublishedHead(sha256=SHA256, uri=head_uri, size_bytes=head_bytes)
        if head_bytes
        else None,
    )
    # Once with the fast path, and again with the durable copy.
    yield topics.PUBLISHED_WEIGHTS, msgspec.structs.replace(published, is_durable=False)
    yield topics.PUBLISHED_WEIGHTS, published
    for lane in range(configuration.log.lanes):
        yield (
            topics.LOADED_WEIGHTS,
            LoadedWeights(
                lane=lane,
                epoch=1,
                lineage=1,
                version=VERSION,
                path="fast",
                duration_s=2.5,
                paused_s=1.5,
            ),
        )


def _groups(planned: PlannedQueue) -> int:
    return planned.queue.groups_per_step


def _scheduled(planned: PlannedQueue) -> ScheduledGroup:
    queue, shape = planned.queue, planned.shape
    return ScheduledGroup(
        group_id=GROUP_ID,
        domain=queue.domain,
        queue_index=OFFSET,
        partition=1,
        tree_sha256=SHA256,
        tree_tokens=shape.prompt + queue.group_size * shape.own_tokens,
        loss_tokens=queue.group_size * shape.turns * shape.sampled,
        attention_pairs=_pairs(planned),
        version_min=VERSION,
        staleness=1,
        request_tokens=queue.group_size * shape.turns * shape.tokens,
        append_tokens=queue.group_size * shape.tokens,
    )


def _trained(groups: int) -> TrainedStep:
    described = msgspec.structs.fields(TrainingMetrics)
    numbers = {field.name: 0.5 for field in described if field.type is float}
    required = {field.name: 1 for field in described if field.required}
    metrics = msgspec.convert({**required, **numbers}, TrainingMetrics)
    gap = LogprobGap(entries=OFFSET, mean=0.5, max=0.5)
    return TrainedStep(
        step=VERSION,
        lineage=1,
        group_ids=(GROUP_ID,) * groups,
        failed_group_ids=(),
        metrics=msgspec.structs.replace(metrics, logprob_gap=gap),
        checkpoint_step=VERSION,
        duration_s=60.5,
    )
