"""Lives of a trainer with one or two ranks, each from one checkpoint to the next."""

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from forgemq_contracts import topics
from forgemq_contracts.lora import Lora
from forgemq_contracts.loss import Loss
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import Speculation
from forgemq_contracts.steps import TrainedStep, TrainingMetrics
from forgemq_contracts.trees import MergedTree
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.command_loop import carry_out_commands
from forgemq_trainer.core.optimizer import Updater
from forgemq_trainer.ranks.alone import AnyRanks
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.storage.optimizer_state import StoredState
from forgemq_trainer.storage.weights import WholeVersion
from forgemq_trainer.store import Store
from forgemq_trainer.training import Training
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
    merge,
    routed,
    scheduled_step,
)

PLAIN = Loss()


@dataclass(frozen=True)
class Life:
    """One life of a trainer: its folder, its model and the steps that it trains.

    Attributes:
        folder: Of the run; it holds the base model.
        steps: To train; the folder's newest checkpoint is of the previous step.
        dtype: Of the model.
        is_routed: True if the trees have expert routes.
        rollouts: Of each group.
        turns: Of each rollout.
        lora: Adapters that train in place of all weights.
        shard_ranks: That hold the model once, if there are several ranks; None for all.
        loss: Of the run.
        expert_ranks: Of several ranks, those that hold all experts between them.
        has_head: True if a draft head trains beside the model; `head` of the folder holds it.
    """

    folder: Path
    steps: Sequence[int]
    dtype: str = "float32"
    is_routed: bool = False
    rollouts: int = 3
    turns: int = 3
    lora: Lora | None = None
    shard_ranks: int | None = None
    loss: Loss = PLAIN
    expert_ranks: int = 1
    has_head: bool = False

    def configuration(self, *, world_size: int) -> RunConfiguration:
        """The run's configuration."""
        configuration = configuration_of(
            self.folder / "base",
            world_size=world_size,
            shard_ranks=self.shard_ranks if world_size > 1 else None,
            expert_ranks=min(self.expert_ranks, world_size),
        )
        return msgspec.structs.replace(
            configuration,
            model=msgspec.structs.replace(configuration.model, dtype=self.dtype),
            lora=self.lora,
            loss=self.loss,
            speculation=Speculation(head=str(self.folder / "head")) if self.has_head else None,
        )

    def trees(self, step: int) -> list[MergedTree]:
        """Trees of the step's groups, the same in every life."""
        generator = np.random.default_rng(step)
        samples = [
            agent_samples(generator, rollouts=self.rollouts, turns=self.turns) for _ in range(3)
        ]
        trees = [merge(each, f"g-{step}-{n}") for n, each in enumerate(samples)]
        return [routed(t, layers=2, top_k=2, experts=4) for t in trees] if self.is_routed else trees


def train(training: Training, life: Life, step: int) -> TrainingMetrics:
    """Train one step of a life, and probe a tree of which it has newer tokens."""
    compute(training, life, step)
    return update(training, life, step)


def compute(training: Training, life: Life, step: int) -> None:
    """Compute the gradients of one step of a life."""
    trees = life.trees(step)
    values = {tree.group_id: topics.encode(tree) for tree in trees}
    training.compute_gradients(training.read(scheduled_step(step, trees), values))


def update(training: Training, life: Life, step: int) -> TrainingMetrics:
    """Take the update of a step whose gradients are computed."""
    samples = [
        dataclasses.replace(sample, version=step)
        for sample in agent_samples(np.random.default_rng(step))
    ]
    fresh = merge(samples, "fresh")
    if life.is_routed:
        fresh = routed(fresh, layers=2, top_k=2, experts=4)
    return training.update((topics.encode(fresh),))


def store_of(folder: Path, configuration: RunConfiguration) -> Store:
    """A store with the trainer's checkpoints and blobs below a folder."""
    return Store(
        TrainerSettings(folder=str(folder / "trainer")),
        blobs=str(folder / "blobs"),
        configuration=configuration,
        telemetry=Telemetry(service="trainer", stream=io.StringIO()),
        is_stopping=lambda: False,
    )


def save_checkpoint(store: Store, training: Training, metrics: TrainingMetrics) -> None:
    """Save the weights and checkpoint of the newest step, which had these metrics."""
    step = training.version - 1
    trained = TrainedStep(
        step=step,
        lineage=1,
        group_ids=(),
        failed_group_ids=(),
        metrics=metrics,
        checkpoint_step=step,
        duration_s=0.0,
    )
    saved = store.keep_version(store.write_version(training, lineage=1))
    weights = saved.checkpointed
    store.save_checkpoint(training, weights=weights, trained=trained, tree_positions=())


def live(ranks: AnyRanks, life: Life) -> list[TrainingMetrics]:
    """Train a life's steps from the newest checkpoint on, with a checkpoint after each."""
    if isinstance(ranks, Ranks) and ranks.rank > 0:
        carry_out_commands(ranks, device="cpu")
        return []
    configuration = life.configuration(world_size=ranks.world_size)
    store = store_of(life.folder, configuration)
    checkpoint = store.newest_checkpoint()
    training = Training(configuration, device="cpu", checkpoint=checkpoint, ranks=ranks)
    seen = []
    for step in life.steps:
        metrics = train(training, life, step)
        save_checkpoint(store, training, metrics)
        seen.append(metrics)
    training.end()
    return seen


def restored(ranks: Ranks, life: Life) -> tuple[WholeVersion, dict[str, torch.Tensor]]:
    """What ranks that have just read a checkpoint would save, and the state that they write."""
    if ranks.rank > 0:
        carry_out_commands(ranks, device="cpu")
        return WholeVersion(), {}
    configuration = life.configuration(world_size=ranks.world_size)
    store = store_of(life.folder, configuration)
    training = Training(
        configuration, device="cpu", checkpoint=store.newest_checkpoint(), ranks=ranks
    )
    version = training.saving.whole_version()
    again = life.folder / "again"
    (again / "optimizer").mkdir(parents=True)
    files = [again / file for file in training.saving.save_optimizer(again)]
    training.end()
    return version, dict(StoredState(files))


def optimizer_tensors(training: Training) -> dict[str, torch.Tensor]:
    """The optimizer's state of a trainer with one rank."""
    updater = training._model.updater
    assert isinstance(updater, Updater)
    return {name: tensor.cpu().clone() for name, tensor in updater.state().items()}
