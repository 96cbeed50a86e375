"""Records of a small run as the services would write them, for tests of what reads them.

Trees are built by the real merger, so an audit that accepts them reads the wire layout right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import FinishedCompletion, TurnPart, WeightSpan
from forgemq_contracts.episodes import FinishedEpisode, ManifestEntry
from forgemq_contracts.groups import (
    AdmittedGroup,
    EpisodeScore,
    RequestedGroup,
    RetiredGroup,
    ScoredCompletion,
    ScoredGroup,
)
from forgemq_contracts.messages import Message
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, StartedRun, Trainer
from forgemq_contracts.steps import ScheduledGroup, ScheduledStep, TrainedStep, TrainingMetrics
from forgemq_contracts.topics import (
    ADMITTED_GROUPS,
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    LOADED_WEIGHTS,
    MERGED_GROUPS,
    MERGED_TREES,
    PUBLISHED_WEIGHTS,
    REPORTED_ENGINES,
    REQUESTED_GROUPS,
    RETIRED_GROUPS,
    SCHEDULED_STEPS,
    SCORED_GROUPS,
    TRAINED_STEPS,
    Topic,
)
from forgemq_contracts.weights import LoadedWeights, PublishedWeights, ReportedEngine
from forgemq_merger.core.merger import MergerCore

DOMAIN = "shop_desk"
GROUP_SIZE = 2
GROUPS_PER_STEP = 2


def configuration(*, steps: int = 3, run: str = "r") -> RunConfiguration:
    return RunConfiguration(
        run=run,
        seed=0,
        model=Model(path="/model", dtype="float32"),
        queues=(
            Queue(
                domain=DOMAIN,
                task_source="m:f",
                agent="m:g",
                group_size=GROUP_SIZE,
                groups_per_step=GROUPS_PER_STEP,
                slots=4,
                window=2,
            ),
        ),
        trainer=Trainer(steps=steps),
        log=LogLayout(group_partitions=2),
    )


def started(*, steps: int = 3, run: str = "r") -> StartedRun:
    made = configuration(steps=steps, run=run)
    return StartedRun(run=run, configuration=made, blobs="/blobs", started_ms=1_000)


def metrics(**changes: float) -> TrainingMetrics:
    made = TrainingMetrics(
        loss=0.5,
        grad_norm=1.0,
        lr=1e-3,
        loss_tokens=100,
        tree_tokens=200,
        request_tokens=600,
        append_tokens=300,
        attention_pairs=5_000,
        ratio_mean=1.0,
        ratio_p99=1.1,
        capped_share=0.0,
        logprob_gap_mean=1e-6,
        logprob_gap_max=1e-4,
        kl_k3=0.0,
        entropy=1.0,
        staleness_max=0,
        forward_backward_s=0.1,
        gap_entries=50,
    )
    return msgspec.structs.replace(made, **changes)


@dataclass
class SyntheticRun:
    """Writes records in the order of their life; `messages` has them all.

    Example: `SyntheticRun().play(steps=2)` trains two steps of two groups each.
    """

    run: str = "r"
    base_ms: int = 10_000
    messages: list[Message] = field(default_factory=list)
    completed_at: dict[str, int] = field(default_factory=dict)  # offset, by completion id
    offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    merger: MergerCore = field(default_factory=lambda: MergerCore(0))
    lost_before_scoring: frozenset[tuple[str, int, int]] = frozenset()  # group, episode, turn
    constrained_turns: frozenset[int] = frozenset()  # sampled under a grammar, in every episode
    lost_before_merging: frozenset[str] = frozenset()  # completion ids

    def put(self, topic: Topic, record: msgspec.Struct, *, partition: int = 0) -> Message:
        offset = self.offsets.get((topic.name, partition), 0)
        self.offsets[topic.name, partition] = offset + 1
        message = Message(
            topic=topic.name,
            partition=partition,
            offset=offset,
            timestamp_ms=self.base_ms + 100 * len(self.messages),
            record=record,
        )
        self.messages.append(message)
        return message

    def play(self, *, steps: int) -> "SyntheticRun":
        """Every step trains the next two groups; all are retired at the end."""
        for step in range(steps):
            groups = [self.generate(step * GROUPS_PER_STEP + i, version=step) for i in range(2)]
            self.train(step, groups, is_last=step == steps - 1)
        return self

    def generate(self, index: int, *, version: int) -> ScheduledGroup:
        """A group from requested to merged; its success rises with the version."""
        group_id = f"g-{index}"
        self.admit(group_id, index=index, version=version)
        ids = [self.episode(group_id, i, version=version) for i in range(GROUP_SIZE)]
        outcomes = [1.0 if version > 0 else 0.0, 1.0]
        scored = ScoredGroup(
            group_id=group_id,
            domain=DOMAIN,
            purpose="train",
            episodes=tuple(
                EpisodeScore(
                    episode_id=f"{group_id}.{i}.0",
                    outcome=outcome,
                    speed=0.5,
                    process=-0.1,
                    total=outcome + 0.4,
                )
                for i, outcome in enumerate(outcomes)
            ),
            completions=tuple(
                ScoredCompletion(
                    completion_id=completion_id,
                    offset=0,
                    episode_index=episode,
                    sequence=turn,
                    return_to_go=1.0,
                    advantage=0.3 - 0.6 * episode,
                )
                for episode, turns in enumerate(ids)
                for turn, completion_id in enumerate(turns)
                if (group_id, episode, turn) not in self.lost_before_scoring
            ),
        )
        self.put(SCORED_GROUPS, scored, partition=self.partition(group_id))
        return self.merge(scored)

    def request(self, group_id: str) -> None:
        self.put(
            REQUESTED_GROUPS,
            RequestedGroup(
                group_id=group_id,
                domain=DOMAIN,
                purpose="train",
                group_size=GROUP_SIZE,
                task=b"{}",
                idempotency_key=group_id,
                requested_ms=0,
            ),
        )

    def admit(self, group_id: str, *, index: int, version: int) -> None:
        self.request(group_id)
        self.put(
            ADMITTED_GROUPS,
            AdmittedGroup(
                group_id=group_id,
                domain=DOMAIN,
                purpose="train",
                group_size=GROUP_SIZE,
                task=b"{}",
                version_at_admission=version,
                queue_index=index,
            ),
        )

    def episode(self, group_id: str, index: int, *, version: int) -> list[str]:
        """Two turns; the second continues the first, the first is shared between episodes."""
        prompt = [7, 8, 9]
        first = self.completion(group_id, index, turn=0, version=version, context=prompt)
        second = self.completion(
            group_id, index, turn=1, version=version, context=[60 + index], parent=first
        )
        self.put(
            FINISHED_EPISODES,
            FinishedEpisode(
                episode_id=f"{group_id}.{index}.0",
                group_id=group_id,
                domain=DOMAIN,
                purpose="train",
                group_size=GROUP_SIZE,
                index=index,
                attempt=0,
                status="completed",
                manifest=tuple(
                    ManifestEntry(
                        completion_id=each.request_id,
                        offset=self.completed_at[each.request_id],
                        sequence=each.turn.sequence,
                        output_tokens=len(each.output) // 4,
                        parent_id=each.parent_id,
                    )
                    for each in (first, second)
                ),
                task=b"{}",
            ),
            partition=self.partition(group_id),
        )
        return [first.request_id, second.request_id]

    def completion(
        self,
        group_id: str,
        episode: int,
        *,
        turn: int,
        version: int,
        context: list[int],
        parent: FinishedCompletion | None = None,
    ) -> FinishedCompletion:
        output = [20 + turn, 30 + episode, 2]
        number = int(group_id.removeprefix("g-"))
        shared = (
            parent.shared_prefix_tokens + len(parent.context + parent.output) // 4 if parent else 0
        )
        record = FinishedCompletion(
            request_id=f"{number:024x}{episode:04x}{turn:04x}",
            attempt=0,
            episode_id=f"{group_id}.{episode}.0",
            group_id=group_id,
            lane=0,
            epoch=1,
            finish_reason="stop",
            turn=TurnPart(sequence=turn, protocol="chat_completions", body_digest="d"),
            parent_id=parent.request_id if parent else None,
            shared_prefix_tokens=shared,
            context=pack_ids(context),
            output=pack_ids(output),
            logprobs=pack_floats([-0.25, -0.5, -0.125]),
            spans=(WeightSpan(start=0, end=3, lineage=1, version=version),),
            engine_s=0.5,
            support="grammar" if turn in self.constrained_turns else "full",
        )
        message = self.put(FINISHED_COMPLETIONS, record, partition=self.partition(group_id))
        self.completed_at[record.request_id] = message.offset
        self.merger.handle(msgspec.structs.replace(message, partition=0))
        return record

    def merge(self, scored: ScoredGroup) -> ScheduledGroup:
        kept = tuple(
            each
            for each in scored.completions
            if each.completion_id not in self.lost_before_merging
        )
        message = Message(
            topic=SCORED_GROUPS.name,
            partition=0,
            offset=0,
            timestamp_ms=0,
            record=msgspec.structs.replace(scored, completions=kept),
        )
        tree, summary = (output.record for output in self.merger.handle(message))
        partition = self.partition(scored.group_id)
        self.put(MERGED_TREES, tree, partition=partition)
        merged = msgspec.structs.replace(summary, partition=partition)
        self.put(MERGED_GROUPS, merged, partition=partition)
        return ScheduledGroup(
            group_id=merged.group_id,
            domain=DOMAIN,
            queue_index=int(merged.group_id.removeprefix("g-")),
            partition=partition,
            tree_sha256=merged.tree_sha256,
            tree_tokens=merged.tree_tokens,
            loss_tokens=merged.loss_tokens,
            attention_pairs=merged.attention_pairs,
            version_min=merged.version_min,
            staleness=0,
            request_tokens=merged.request_tokens,
            append_tokens=merged.append_tokens,
        )

    def train(
        self, step: int, groups: list[ScheduledGroup], *, lineage: int = 1, is_last: bool = False
    ) -> None:
        self.schedule(step, groups, is_last=is_last)
        self.step_done(step, groups, lineage=lineage, is_last=is_last)
        self.publish(step + 1, lineage=lineage)
        for group in groups:
            self.retire(group.group_id, step=step)

    def schedule(self, step: int, groups: list[ScheduledGroup], *, is_last: bool = False) -> None:
        fresh = [
            msgspec.structs.replace(group, staleness=step - group.version_min) for group in groups
        ]
        self.put(
            SCHEDULED_STEPS,
            ScheduledStep(step=step, groups=tuple(fresh), staleness_bound=2, is_last=is_last),
        )

    def step_done(
        self, step: int, groups: list[ScheduledGroup], *, lineage: int = 1, is_last: bool = False
    ) -> None:
        self.put(
            TRAINED_STEPS,
            TrainedStep(
                step=step,
                lineage=lineage,
                group_ids=tuple(group.group_id for group in groups),
                failed_group_ids=(),
                metrics=metrics(),
                checkpoint_step=step,
                duration_s=1.0,
                is_last=is_last,
            ),
        )

    def publish(self, version: int, *, lineage: int = 1) -> None:
        self.put(
            PUBLISHED_WEIGHTS,
            PublishedWeights(
                lineage=lineage, version=version, sha256="0" * 64, uri="/w", size_bytes=1
            ),
        )
        weights = {"lane": 0, "epoch": 1, "lineage": lineage, "version": version}
        self.put(LOADED_WEIGHTS, LoadedWeights(**weights, path="fast", duration_s=0.2))
        self.put(
            REPORTED_ENGINES,
            ReportedEngine(
                **weights, url="http://e", is_serving=True, running=3, queued=1, reported_ms=version
            ),
        )

    def retire(self, group_id: str, *, step: int | None = None, reason: str = "trained") -> None:
        self.put(
            RETIRED_GROUPS,
            RetiredGroup(
                group_id=group_id,
                domain=DOMAIN,
                purpose="train",
                reason=reason,
                queue_index=int(group_id.removeprefix("g-")),
                step=step,
            ),
            partition=self.partition(group_id),
        )

    def partition(self, group_id: str) -> int:
        return group_partition(group_id, partitions=2)

    def of(self, topic: Topic) -> Iterator[Message]:
        return (message for message in self.messages if message.topic == topic.name)

    def changed(
        self, topic: Topic, change: Callable[[msgspec.Struct], msgspec.Struct | None]
    ) -> list[Message]:
        """The messages with every record of a topic replaced; None leaves it out."""
        result = []
        for message in self.messages:
            if message.topic != topic.name:
                result.append(message)
                continue
            record = change(message.record)
            if record is not None:
                result.append(msgspec.structs.replace(message, record=record))
        return result
