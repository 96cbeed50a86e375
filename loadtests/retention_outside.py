"""What the edges of a run write: gateway, agents, graders, lanes and the trainer, as records.

Groups are requested one after the other. All that are admitted at one moment play together, turn
by turn, so as many groups are open at once as the queue has slots.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from forgemq_bus.log import Emit
from forgemq_contracts import topics
from forgemq_contracts.completions import (
    DeliveredCompletion,
    FinishedCompletion,
    RequestedCompletion,
    TurnPart,
    WeightSpan,
)
from forgemq_contracts.episodes import (
    FinishedEpisode,
    GradedEpisode,
    ManifestEntry,
    OpenedEpisode,
    Sampling,
)
from forgemq_contracts.groups import AdmittedGroup, RequestedGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.ownership import ReportedGateway
from forgemq_contracts.partitions import episode_id, group_id, group_partition
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.steps import ScheduledStep, TrainedStep, TrainingMetrics
from forgemq_contracts.weights import LoadedWeights, PublishedWeights, ReportedEngine
from forgemq_shell.records import emit_of

COMPLETIONS_A_DAY = 1_000_000
SECONDS_A_COMPLETION = 86_400 / COMPLETIONS_A_DAY
VOCABULARY = 150_000  # about that of Qwen3
RUN = "retention"
LANES = 4
PARTITIONS = 4
TEXT_BYTES_A_TOKEN = 4
"""Of a message, for each of its tokens: about that of English."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of a run's groups; lengths in tokens, of the task in bytes.

    Attributes:
        groups: Of the shorter run; a multiple of groups_per_step.
        slots: N, groups that are open at once.
    """

    groups: int
    slots: int
    groups_per_step: int
    rollouts: int
    turns: int
    prompt: int
    act: int
    observe: int
    task: int

    @property
    def configuration(self) -> RunConfiguration:
        """A run of one queue of such groups."""
        queue = Queue(
            domain="d",
            task_source="tasks:make",
            agent="agent:play",
            slots=self.slots,
            groups_per_step=self.groups_per_step,
            group_size=self.rollouts,
            groups_requested_max=10**6,
        )
        return RunConfiguration(
            run=RUN,
            seed=0,
            model=Model(path="model"),
            queues=(queue,),
            trainer=Trainer(steps=10**6),
            log=LogLayout(group_partitions=PARTITIONS, lanes=LANES),
        )


# The cases: groups * rollouts * turns completions in the shorter run.
WORKLOADS = {
    "single_turn": Workload(
        groups=256, slots=32, groups_per_step=16, rollouts=16, turns=1, prompt=300, act=400,
        observe=0, task=600,
    ),
    "ten_turns": Workload(
        groups=32, slots=8, groups_per_step=4, rollouts=16, turns=10, prompt=2_000, act=240,
        observe=360, task=1_500,
    ),
    "context_200k": Workload(
        groups=12, slots=4, groups_per_step=2, rollouts=8, turns=40, prompt=16_000, act=400,
        observe=4_200, task=3_000,
    ),
}  # fmt: skip


@dataclass(slots=True)
class _Playing:
    """An episode between its first and its last turn."""

    group: AdmittedGroup
    index: int
    tokens: int = 0
    manifest: list[ManifestEntry] = field(default_factory=list)

    @property
    def episode_id(self) -> str:
        return episode_id(group=self.group.group_id, index=self.index, attempt=0)


class Outside:
    """Makes the records; knows the run's clock and the newest weights."""

    def __init__(self, workload: Workload, *, vocabulary: int = VOCABULARY) -> None:
        self.workload = workload
        self._vocabulary = vocabulary
        self.now_s = 0.0
        self.completions = 0
        self.version = 0
        self._generator = np.random.default_rng(0)
        self._heartbeats = 0

    @property
    def now_ms(self) -> int:
        """The run's clock in ms."""
        return int(self.now_s * 1000)

    def requested(self, number: int) -> Emit:
        """The request for the group of task `number`."""
        key = f"d/{number}"
        record = RequestedGroup(
            group_id=group_id(run=RUN, domain="d", idempotency_key=key),
            domain="d",
            purpose="train",
            group_size=self.workload.rollouts,
            task=json.dumps({"task": self._text(self.workload.task)}).encode(),
            idempotency_key=key,
            requested_ms=self.now_ms,
        )
        return _emit(topics.REQUESTED_GROUPS, record)

    def heartbeats(self) -> list[Emit]:
        """What lanes and gateway report: once a second, each."""
        due, self._heartbeats = int(self.now_s) - self._heartbeats, int(self.now_s)
        return self.reports() if due > 0 else []

    def reports(self) -> list[Emit]:
        """One heartbeat of each lane, and of the gateway."""
        url = "http://10.0.1.1:8000"
        gateway = ReportedGateway(
            run=RUN,
            gateway=f"{url}#0a1b2c3d",
            url=url,
            started_ms=1,
            reported_ms=self.now_ms,
            owner=1,
        )
        return [
            _emit(topics.REPORTED_GATEWAYS, gateway),
            *self.engine_reports(),
        ]

    def engine_reports(self) -> list[Emit]:
        """One heartbeat of each lane."""
        return [
            _emit(
                topics.REPORTED_ENGINES,
                ReportedEngine(
                    lane=lane, epoch=1, url=f"http://10.0.0.{lane}:30000", is_serving=True,
                    lineage=1, version=self.version, running=16, queued=0,
                    reported_ms=self.now_ms, context_tokens_max=200_000,
                    output_tokens_total=self.completions * self.workload.act,
                ),
                partition=lane,
            )
            for lane in range(LANES)
        ]  # fmt: skip

    def opened(self, group: AdmittedGroup) -> tuple[list[_Playing], list[Emit]]:
        """All episodes of a group, claimed."""
        playing = [_Playing(group, index) for index in range(group.group_size)]
        return playing, [
            self._of_group(
                topics.OPENED_EPISODES,
                OpenedEpisode(
                    episode_id=one.episode_id,
                    group_id=group.group_id,
                    index=one.index,
                    attempt=0,
                    key_sha256=hashlib.sha256(one.episode_id.encode()).hexdigest(),
                    sampling=Sampling(),
                    history="append_only",
                    lease_s=60.0,
                    opened_ms=self.now_ms,
                ),
            )
            for one in playing
        ]

    def turn(self, one: _Playing, offset: int) -> list[Emit]:
        """A turn of an episode; its completion will have this offset in its partition."""
        workload, turn = self.workload, len(one.manifest)
        parent = one.manifest[-1].completion_id if turn else None
        number = f"{one.episode_id}/{turn}".encode()
        request_id = hashlib.blake2b(number, digest_size=16).hexdigest()
        new = workload.observe if turn else workload.prompt
        lane, shared = one.index % LANES, one.tokens
        common: dict[str, Any] = {
            "request_id": request_id, "attempt": 0, "episode_id": one.episode_id,
            "group_id": one.group.group_id, "lane": lane, "epoch": 1, "parent_id": parent,
            "shared_prefix_tokens": shared, "context": self._tokens(new),
            "turn": self._turn_part(turn, new),
        }  # fmt: skip
        requested = RequestedCompletion(
            **common,
            sampling=Sampling(),
            deadline_ms=self.now_ms + 900_000,
            requested_ms=self.now_ms,
            is_delta=bool(turn),
        )
        finished = FinishedCompletion(
            **common,
            finish_reason="stop",
            output=self._tokens(workload.act),
            logprobs=self._generator.random(workload.act, dtype=np.float32).tobytes(),
            spans=(WeightSpan(start=0, end=workload.act, lineage=1, version=self.version),),
            queued_s=0.001,
            engine_s=1.0,
            cached_tokens=shared,
        )
        delivered = DeliveredCompletion(
            request_id=request_id,
            episode_id=one.episode_id,
            group_id=one.group.group_id,
            delivered_ms=self.now_ms,
        )
        one.tokens += new + workload.act
        one.manifest.append(
            ManifestEntry(
                completion_id=request_id,
                offset=offset,
                sequence=turn,
                output_tokens=workload.act,
                parent_id=parent,
            )
        )
        self.completions += 1
        self.now_s += SECONDS_A_COMPLETION
        return [
            _emit(topics.REQUESTED_COMPLETIONS, requested, partition=lane),
            self._of_group(topics.FINISHED_COMPLETIONS, finished),
            self._of_group(topics.DELIVERED_COMPLETIONS, delivered),
        ]

    def ended(self, one: _Playing) -> list[Emit]:
        """The end of an episode and its grade: half of a group pass."""
        group = one.group
        finished = FinishedEpisode(
            episode_id=one.episode_id,
            group_id=group.group_id,
            domain=group.domain,
            purpose=group.purpose,
            group_size=group.group_size,
            index=one.index,
            attempt=0,
            status="completed",
            manifest=tuple(one.manifest),
            task=group.task,
            result=b'{"answer":"' + self._text(40).encode() + b'"}',
            engine_s=float(len(one.manifest)),
            duration_s=2.0 * len(one.manifest),
        )
        graded = GradedEpisode(
            episode_id=one.episode_id,
            group_id=group.group_id,
            grader="rewards:outcome",
            grader_version="1",
            outcome=float(one.index % 2),
            speed=0.5,
        )
        return [
            self._of_group(topics.FINISHED_EPISODES, finished),
            self._of_group(topics.GRADED_EPISODES, graded),
        ]

    def trained(self, step: ScheduledStep) -> Emit:
        """The step as the trainer reports it; new weights follow."""
        zeros = {f.name: 0.5 for f in msgspec.structs.fields(TrainingMetrics) if f.type is float}
        required = [f.name for f in msgspec.structs.fields(TrainingMetrics) if f.required]
        metrics = msgspec.convert(dict.fromkeys(required, 0) | zeros, TrainingMetrics)
        self.version = step.step + 1
        return _emit(
            topics.TRAINED_STEPS,
            TrainedStep(
                step=step.step,
                lineage=1,
                group_ids=tuple(group.group_id for group in step.groups),
                failed_group_ids=(),
                metrics=metrics,
                checkpoint_step=step.step,
                duration_s=60.0,
            ),
        )

    def loaded(self) -> list[Emit]:
        """The newest weights, published and loaded by every lane."""
        published = PublishedWeights(
            lineage=1,
            version=self.version,
            sha256=hashlib.sha256(b"%d" % self.version).hexdigest(),
            uri=f"file:///runs/{RUN}/weights/1-{self.version}",
            size_bytes=16_000_000_000,
        )
        loaded = [
            LoadedWeights(
                lane=lane, epoch=1, lineage=1, version=self.version, path="fast", duration_s=2.0
            )
            for lane in range(LANES)
        ]
        return [
            _emit(topics.PUBLISHED_WEIGHTS, published),
            *(_emit(topics.LOADED_WEIGHTS, one, partition=one.lane) for one in loaded),
            *self.reports(),
        ]

    def _turn_part(self, turn: int, new_tokens: int) -> TurnPart:
        message = {"role": "tool" if turn else "user", "content": self._content(new_tokens)}
        return TurnPart(
            sequence=turn,
            protocol="chat_completions",
            body_digest=self._generator.bytes(16).hex(),
            messages=json.dumps([message]).encode(),
            message_digests=(self._generator.bytes(16).hex(),),
            message_ends=(new_tokens,),
        )

    def _content(self, tokens: int) -> str:
        return self._text(tokens * TEXT_BYTES_A_TOKEN)

    def _text(self, size: int) -> str:
        return self._generator.integers(97, 123, size, dtype=np.uint8).tobytes().decode()

    def _tokens(self, count: int) -> bytes:
        return self._generator.integers(0, self._vocabulary, count, dtype=np.int32).tobytes()

    def _of_group(self, topic: topics.Topic, record: msgspec.Struct) -> Emit:
        return _emit(topic, record, partition=partition_of(record))


def partition_of(record: msgspec.Struct) -> int:
    """Partition of the record's group in every topic that is partitioned by group."""
    group: str = msgspec.structs.asdict(record)["group_id"]
    return group_partition(group, partitions=PARTITIONS)


def _emit(topic: topics.Topic, record: msgspec.Struct, *, partition: int = 0) -> Emit:
    return emit_of(Output(topic=topic.name, partition=partition, record=record))
