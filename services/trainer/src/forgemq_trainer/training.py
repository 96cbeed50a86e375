"""Trains steps: decoded records in, new weights and numbers out. No log, no clock but a stopwatch.

Runs in a worker thread; one call at a time.
"""

import hashlib
import importlib
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import torch

from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledGroup, ScheduledStep, TrainingMetrics
from forgemq_contracts.trees import MergedTree
from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.assignment import plan_rounds
from forgemq_trainer.core.flops import savings
from forgemq_trainer.core.forward import Policy
from forgemq_trainer.core.loss import LossFunction, UserLoss, loss_function
from forgemq_trainer.core.memory import plan_step
from forgemq_trainer.core.metrics import entry_metrics, group_totals, training_metrics
from forgemq_trainer.core.optimizer import Updater, learning_rate
from forgemq_trainer.core.reference import with_references
from forgemq_trainer.core.rounds import forward_backward_rounds, values_bytes, values_of
from forgemq_trainer.core.routes import check_routes, token_routes
from forgemq_trainer.core.step import (
    EntryValues,
    forward_backward,
    group_weights,
    merged,
)
from forgemq_trainer.core.tree import Forest, InvalidTreeError, read_tree
from forgemq_trainer.heap import keep_freed_memory, suit_heap
from forgemq_trainer.model import load_model
from forgemq_trainer.ranks import commands
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharded_updater import ShardedUpdater
from forgemq_trainer.ranks.sharding import FsdpShards, sharded, whole_state
from forgemq_trainer.storage.checkpoint import Checkpoint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStep:
    """A scheduled step whose trees were read: what can train, and what cannot.

    Attributes:
        scheduled: the step.
        groups: those whose tree is intact, in order.
        forests: their trees.
        failed: groups left out, and why.
        completion_ids: of all samples in the trees.
        values: wire bytes by group id, as they were read.
    """

    scheduled: ScheduledStep
    groups: tuple[ScheduledGroup, ...]
    forests: tuple[Forest, ...]
    failed: tuple[tuple[str, str], ...]
    completion_ids: tuple[str, ...]
    values: Mapping[str, bytes]


class Training:
    """The model, the optimizer and the loss of a run; `train` is one optimizer step.

    Example: a new run is at version 0; `train(step 0)` makes it version 1. Made from the
    checkpoint of step 6 it is at version 7, and continues to the same bytes.

    With several ranks each of them has one, with a shard of the model. What is called on rank 0's
    is announced to the others, which then call the same on theirs.
    """

    def __init__(
        self,
        configuration: RunConfiguration,
        *,
        device: str,
        checkpoint: Checkpoint | None,
        ranks: Ranks | None = None,
    ) -> None:
        folder = "" if checkpoint is None else str(checkpoint.folder)
        self._ranks = ranks
        self._announce(commands.Begin(configuration=configuration, checkpoint=folder))
        torch.set_num_threads(configuration.trainer.threads)
        if device == "cpu":
            keep_freed_memory()
        torch.manual_seed(configuration.seed)
        base = Path(configuration.model.path)
        self._configuration = configuration
        self._device = torch.device(device)
        dtype = configuration.model.dtype
        self._loaded = load_model(
            base if checkpoint is None else checkpoint.folder,
            dtype=dtype if ranks is None else "float32",  # Shards are the fp32 masters.
            device=device,
            place=device if ranks is None else "cpu",  # A GPU need not hold what it has a part of.
        )
        self._updater: Updater | ShardedUpdater
        if ranks is None:
            self._updater = Updater(self._loaded.model, configuration.optimizer)
        else:
            self._loaded = sharded(self._loaded, ranks=ranks, dtype=_DTYPES[dtype])
            shards = FsdpShards(ranks, dtype=_DTYPES[dtype])
            self._updater = ShardedUpdater(
                self._loaded.model, configuration.optimizer, shards=shards
            )
        self._loss = _loss_of(configuration)
        self._reference = _reference_of(configuration, device=device)
        self.version = 0
        if checkpoint is not None:
            self._updater.restore(checkpoint.optimizer_state())
            torch.set_rng_state(checkpoint.random_state())
            self.version = checkpoint.step + 1

    @property
    def model(self) -> torch.nn.Module:
        """The model at `version`."""
        return self._loaded.model

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint of `version`; of several ranks on rank 0, empty on the others."""
        self._announce(commands.GatherOptimizer())
        with self._together():
            return self._updater.state()

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """The model's state where ranks hold shards of it, on rank 0; None where `model` has it."""
        if self._ranks is None:
            return None
        self._announce(commands.GatherWeights())
        dtype = _DTYPES[self._configuration.model.dtype]
        with self._together():
            return whole_state(self._loaded.model, dtype=dtype, is_kept=self._ranks.rank == 0)

    def end(self) -> None:
        """Let the other ranks go; nothing is called after it."""
        self._announce(commands.End())

    def read(self, scheduled: ScheduledStep, values: Mapping[str, bytes]) -> ReadStep:
        """The step's trees from their wire bytes.

        Args:
            scheduled: the step.
            values: wire bytes by group id; a missing or damaged one fails its group only.
        """
        groups: list[ScheduledGroup] = []
        forests: list[Forest] = []
        failed: list[tuple[str, str]] = []
        completion_ids: list[str] = []
        for group in scheduled.groups:
            try:
                tree = _decoded(group, values.get(group.group_id))
                forest = read_tree(tree)
                self._check_fits(forest)
            except InvalidTreeError as error:
                failed.append((group.group_id, str(error)))
                continue
            groups.append(group)
            forests.append(forest)
            completion_ids.extend(tree.sample_ids)
        return ReadStep(
            scheduled=scheduled,
            groups=tuple(groups),
            forests=tuple(forests),
            failed=tuple(failed),
            completion_ids=tuple(completion_ids),
            values=values,
        )

    def train(self, step: ReadStep) -> TrainingMetrics:
        """One optimizer step over the trees; the version rises by one.

        Raises:
            NonFiniteGradientError: the weights are unchanged.
            RankLostError: another rank is gone.
            ValueError: the step is not the next one, or the memory budget is too small.
        """
        if step.scheduled.step != self.version:
            raise ValueError(
                f"version {self.version} trains step {self.version}, got {step.scheduled.step}"
            )
        # The groups as they are trained here: of a step trained again that may be fewer.
        scheduled = msgspec.structs.replace(step.scheduled, groups=step.groups)
        values = {group.group_id: step.values[group.group_id] for group in step.groups}
        self._announce(commands.TrainStep(scheduled=scheduled, values=values))
        with self._together(), _current(self._device):
            return self._trained(step)

    def _trained(self, step: ReadStep) -> TrainingMetrics:
        started_s = time.perf_counter()
        seen = self._forward_backward(step.forests)
        forward_backward_s = time.perf_counter() - started_s
        lr = learning_rate(
            self._configuration.optimizer,
            step=self.version,
            steps=self._configuration.trainer.steps,
        )
        has_entries = any(forest.entry_count for forest in step.forests)
        grad_norm = self._updater.update(lr=lr) if has_entries else 0.0
        metrics = training_metrics(
            entry_metrics(seen, current_version=self.version),
            group_totals(step.groups),
            loss=seen.loss,
            loss_tokens=len(seen.logprob_E),
            grad_norm=grad_norm,
            lr=lr,
            forward_backward_s=forward_backward_s,
            saved=savings(self._loaded.policy.shape, step.forests),
            route_disagreements=self._route_disagreements(step.forests),
        )
        self.version += 1
        return metrics

    def _announce(self, command: commands.Command) -> None:
        if self._ranks is not None:
            self._ranks.announce(commands.encode(command))

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.together()

    def _route_disagreements(self, forests: tuple[Forest, ...]) -> int:
        policy = self._loaded.policy
        layers, top_k = len(policy.routers), policy.shape.experts_per_token
        routes = [token_routes(forest, layers=layers, top_k=top_k) for forest in forests]
        return sum(route.disagreements for route in routes if route is not None)

    def _forward_backward(self, forests: tuple[Forest, ...]) -> EntryValues:
        if self._ranks is not None:
            return self._of_ranks(forests, self._ranks)
        trainer, policy = self._configuration.trainer, self._loaded.policy
        try:
            microbatches = plan_step(
                forests,
                shape=policy.shape,
                budget_bytes=trainer.memory_budget_bytes,
                head_chunk=trainer.head_chunk_tokens,
                carried="path",
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error  # a restart has no more memory
        if policy.head_VH.device.type == "cpu":
            predicted = max((batch.predicted_bytes for batch in microbatches), default=0)
            suit_heap(predicted_bytes=predicted, budget_bytes=trainer.memory_budget_bytes)
        if self._reference is not None:
            forests = with_references(
                self._reference, forests, microbatches, head_chunk=trainer.head_chunk_tokens
            )
        return forward_backward(
            policy,
            forests,
            microbatches,
            weights=group_weights(forests, normalisation=self._configuration.loss.normalisation),
            loss=self._loss,
            head_chunk=trainer.head_chunk_tokens,
        )

    def _of_ranks(self, forests: tuple[Forest, ...], ranks: Ranks) -> EntryValues:
        trainer, policy = self._configuration.trainer, self._loaded.policy
        try:
            rounds = plan_rounds(
                forests,
                shape=policy.shape,
                world_size=ranks.world_size,
                budget_bytes=trainer.memory_budget_bytes,
                head_chunk=trainer.head_chunk_tokens,
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error
        own = forward_backward_rounds(
            policy,
            forests,
            rounds,
            peers=ranks,
            weights=group_weights(forests, normalisation=self._configuration.loss.normalisation),
            loss=self._loss,
            head_chunk=trainer.head_chunk_tokens,
        )
        everyones = ranks.collected(values_bytes(own))
        return merged([values_of(part) for part in everyones]) if everyones else own

    def _check_fits(self, forest: Forest) -> None:
        policy = self._loaded.policy
        vocabulary = policy.shape.vocabulary
        check_routes(
            forest,
            layers=len(policy.routers),
            top_k=policy.shape.experts_per_token,
            experts=policy.shape.experts,
        )
        if forest.tokens_N.min() < 0 or forest.tokens_N.max() >= vocabulary:
            raise InvalidTreeError(f"tokens: ids must be in 0..{vocabulary - 1}")


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the thread's own: what names no device would wake up the first one instead."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _decoded(group: ScheduledGroup, value: bytes | None) -> MergedTree:
    if value is None:
        raise InvalidTreeError("the tree is not on the log, or its blob is lost")
    sha256 = hashlib.sha256(value).hexdigest()
    if sha256 != group.tree_sha256:
        raise InvalidTreeError(f"the tree has sha256 {sha256}, scheduled was {group.tree_sha256}")
    try:
        tree = topics.decode(topics.MERGED_TREES, value)
    except msgspec.MsgspecError as error:
        raise InvalidTreeError(f"the tree does not decode: {error}") from error
    assert isinstance(tree, MergedTree)
    return tree


def _reference_of(configuration: RunConfiguration, *, device: str) -> Policy | None:
    """The model that the run started from, where its loss has a weight for it."""
    if not configuration.loss.reference_weight:
        return None
    if configuration.trainer.world_size > 1:
        raise SettingsError("loss.reference_weight above 0 needs trainer.world_size 1")
    loaded = load_model(
        Path(configuration.model.path), dtype=configuration.model.dtype, device=device
    )
    loaded.model.requires_grad_(requires_grad=False)
    return loaded.policy


def _loss_of(configuration: RunConfiguration) -> LossFunction:
    """The run's loss; raises SettingsError where its name leads nowhere."""
    kind = configuration.loss.kind
    try:
        if ":" not in kind:
            return loss_function(configuration.loss)
        module, _, name = kind.partition(":")
        # The user's function is called with our types; its own annotations are not checked.
        user = cast(UserLoss, getattr(importlib.import_module(module), name))
    except (ValueError, ImportError, AttributeError) as error:
        raise SettingsError(f"loss.kind {kind}: {error}") from error
    return loss_function(configuration.loss, user=user)
