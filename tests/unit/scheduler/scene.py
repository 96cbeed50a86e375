"""A scheduler core, and the records that other services would write for it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from forgemq_contracts.episodes import OpenedEpisode, Sampling
from forgemq_contracts.groups import (
    AdmittedGroup,
    ClosedGroup,
    MergedGroup,
    RequestedGroup,
    RetiredGroup,
)
from forgemq_contracts.messages import Message, Tick
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.run_rules import check
from forgemq_contracts.steps import ScheduledStep, TrainedStep, TrainingMetrics
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_scheduler.core import SchedulerCore

METRICS = TrainingMetrics(
    loss=0.0,
    grad_norm=0.0,
    lr=0.0,
    loss_tokens=0,
    tree_tokens=0,
    request_tokens=0,
    append_tokens=0,
    attention_pairs=0,
    ratio_mean=1.0,
    ratio_p99=1.0,
    capped_share=0.0,
    logprob_gap_mean=0.0,
    logprob_gap_max=0.0,
    kl_k3=0.0,
    entropy=0.0,
    staleness_max=0,
    forward_backward_s=0.0,
)


def configuration_of(
    *queues: Queue, steps: int = 100, ahead: int = 1, lanes: int = 4
) -> RunConfiguration:
    configuration = RunConfiguration(
        run="test",
        seed=0,
        model=Model(path="model"),
        queues=queues,
        trainer=Trainer(steps=steps, steps_ahead_max=ahead),
        log=LogLayout(group_partitions=4, lanes=lanes),
    )
    check(configuration)
    return configuration


def queue_of(
    *, slots: int, per_step: int, window: int, domain: str = "d", **settings: Any
) -> Queue:
    return Queue(
        domain=domain,
        task_source="",
        agent="",
        slots=slots,
        groups_per_step=per_step,
        window=window,
        **{"group_deadline_s": 100.0, **settings},
    )


def opened_episode(group: str, *, index: int = 0, attempt: int = 0) -> OpenedEpisode:
    return OpenedEpisode(
        episode_id=f"{group}.{index}.{attempt}",
        group_id=group,
        index=index,
        attempt=attempt,
        key_sha256="0" * 64,
        sampling=Sampling(),
        history="append_only",
        lease_s=60.0,
        opened_ms=0,
    )


class Scene:
    """Feeds records one by one and checks the invariants after each; keeps outputs by type."""

    def __init__(self, configuration: RunConfiguration) -> None:
        self.core = SchedulerCore(configuration)
        self.admitted: list[AdmittedGroup] = []
        self.steps: list[ScheduledStep] = []
        self.retired: list[RetiredGroup] = []
        self.closed: list[str] = []
        self.places: list[tuple[str, int]] = []

    def feed(self, record: msgspec.Struct) -> list[msgspec.Struct]:
        return self._handle(Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record))

    def _handle(self, event: Message | Tick) -> list[msgspec.Struct]:
        outputs = self.core.handle(event)
        self.core._check()
        written = len(outputs)
        self.core._advance()
        assert len(self.core._outputs) == written, "a second look decides nothing more"
        for output in outputs:
            self.places.append((output.topic, output.partition))
            match output.record:
                case AdmittedGroup() as admitted:
                    self.admitted.append(admitted)
                case ScheduledStep() as step:
                    self.steps.append(step)
                case RetiredGroup() as retired:
                    self.retired.append(retired)
                case ClosedGroup() as closed:
                    assert closed.group_id not in self.closed, "closed twice"
                    self.closed.append(closed.group_id)
        return [output.record for output in outputs]

    def tick(self, run_s: float) -> list[msgspec.Struct]:
        return self._handle(Tick(run_ms=round(run_s * 1000)))

    def request(
        self, *numbers: int, domain: str = "d", purpose: str = "train", source: str = "agent"
    ) -> None:
        for number in numbers:
            self.feed(
                RequestedGroup(
                    group_id=f"g-{number}",
                    domain=domain,
                    purpose=purpose,
                    group_size=4,
                    task=b'{"k":%d}' % number,
                    idempotency_key=str(number),
                    requested_ms=0,
                    source=source,
                )
            )

    def report(
        self,
        lane: int = 0,
        *,
        version: int = 0,
        lineage: int = 1,
        epoch: int = 0,
        is_serving: bool = True,
    ) -> None:
        self.feed(
            ReportedEngine(
                lane=lane,
                epoch=epoch,
                url="",
                is_serving=is_serving,
                lineage=lineage,
                version=version,
                running=0,
                queued=0,
                reported_ms=0,
            )
        )

    def open(self, *numbers: int, index: int = 0, attempt: int = 0) -> None:
        """Let an agent claim an episode of these groups."""
        for number in numbers:
            self.feed(opened_episode(f"g-{number}", index=index, attempt=attempt))

    def load(self, lane: int = 0, *, version: int, lineage: int = 1, epoch: int = 0) -> None:
        self.feed(
            LoadedWeights(
                lane=lane,
                epoch=epoch,
                lineage=lineage,
                version=version,
                path="fast",
                duration_s=0.0,
            )
        )

    def merge(
        self,
        *numbers: int,
        version: int = 0,
        not_trainable: str = "",
        domain: str = "d",
        purpose: str = "train",
    ) -> None:
        for number in numbers:
            self.feed(
                MergedGroup(
                    group_id=f"g-{number}",
                    domain=domain,
                    purpose=purpose,
                    partition=number % 4,
                    tree_sha256=None if not_trainable else f"{number:064x}",
                    tree_tokens=10 + number,
                    version_min=version,
                    not_trainable=not_trainable,
                )
            )

    def train(
        self,
        step: int,
        *,
        failed: Sequence[int] = (),
        lineage: int = 1,
        checkpoint: int | None = None,
        groups: Sequence[str] | None = None,
    ) -> None:
        lost = tuple(f"g-{number}" for number in failed)
        scheduled = [group.group_id for group in self.steps[step].groups]
        ids = [group_id for group_id in groups or scheduled if group_id not in lost]
        self.feed(
            TrainedStep(
                step=step,
                lineage=lineage,
                group_ids=tuple(ids),
                failed_group_ids=lost,
                metrics=METRICS,
                checkpoint_step=step if checkpoint is None else checkpoint,
                duration_s=0.0,
            )
        )

    def admitted_ids(self) -> list[int]:
        return [int(group.group_id[2:]) for group in self.admitted]

    def taken(self, step: int) -> list[int]:
        return [int(group.group_id[2:]) for group in self.steps[step].groups]

    def ends(self) -> dict[int, str]:
        return {int(group.group_id[2:]): group.reason for group in self.retired}


DEMO = queue_of(slots=12, per_step=6, window=4)


def scene_of(*queues: Queue, lanes_reported: int = 1, **configuration: Any) -> Scene:
    """A scene whose lanes serve version 0."""
    scene = Scene(configuration_of(*(queues or (DEMO,)), **configuration))
    for lane in range(lanes_reported):
        scene.report(lane)
    return scene
