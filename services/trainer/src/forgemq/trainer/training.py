"""Trains steps: decoded records in, new weights and numbers out. No log, no clock but a stopwatch.

Runs in a worker thread; one call at a time.
"""

import hashlib
import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import torch

from forgemq.contracts import topics
from forgemq.contracts.run import RunConfiguration
from forgemq.contracts.steps import ScheduledGroup, ScheduledStep, TrainingMetrics
from forgemq.contracts.trees import MergedTree
from forgemq.trainer.checkpoint import Checkpoint
from forgemq.trainer.core.loss import LossFunction, UserLoss, loss_function
from forgemq.trainer.core.memory import plan_step
from forgemq.trainer.core.metrics import entry_metrics, group_totals
from forgemq.trainer.core.optimizer import Updater, learning_rate
from forgemq.trainer.core.step import forward_backward, group_weights
from forgemq.trainer.core.tree import Forest, InvalidTreeError, read_tree
from forgemq.trainer.model import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step as it was trained.

    Attributes:
        trained: groups in it, in order.
        failed: groups left out, and why.
        completion_ids: of all samples that were trained.
        metrics: what was measured.
    """

    trained: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    completion_ids: tuple[str, ...]
    metrics: TrainingMetrics


class Training:
    """The model, the optimizer and the loss of a run; `train` is one optimizer step.

    Example: a new run is at version 0; `train(step 0)` makes it version 1. Made from the
    checkpoint of step 6 it is at version 7, and continues to the same bytes.
    """

    def __init__(
        self, configuration: RunConfiguration, *, device: str, checkpoint: Checkpoint | None
    ) -> None:
        torch.set_num_threads(configuration.trainer.threads)
        torch.manual_seed(configuration.seed)
        base = Path(configuration.model.path)
        self._configuration = configuration
        self._loaded = load_model(
            base if checkpoint is None else checkpoint.folder,
            dtype=configuration.model.dtype,
            device=device,
        )
        self._updater = Updater(self._loaded.model, configuration.optimizer)
        self._loss = _loss_of(configuration)
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
        """For a checkpoint of `version`."""
        return self._updater.state()

    def train(self, scheduled: ScheduledStep, values: Mapping[str, bytes]) -> StepResult:
        """One optimizer step over the trees that can be read; the version rises by one.

        Args:
            scheduled: the step; its number is the present version.
            values: wire bytes of trees by group id; a missing one fails its group.

        Raises:
            NonFiniteGradientError: the weights are unchanged.
            ValueError: the step is not the next one, or the memory budget is too small.
        """
        if scheduled.step != self.version:
            raise ValueError(f"version {self.version} trains step {self.version}, not others")
        started_s = time.perf_counter()
        groups, forests, failed, completion_ids = self._read(scheduled, values)
        trainer, policy = self._configuration.trainer, self._loaded.policy
        (microbatches,) = plan_step(
            forests,
            shape=policy.shape,
            world_size=1,
            budget_bytes=trainer.memory_budget_bytes,
            head_chunk=trainer.head_chunk_tokens,
        )
        seen = forward_backward(
            policy,
            forests,
            microbatches,
            weights=group_weights(forests, normalisation=self._configuration.loss.normalisation),
            loss=self._loss,
            head_chunk=trainer.head_chunk_tokens,
        )
        forward_backward_s = time.perf_counter() - started_s
        lr = learning_rate(self._configuration.optimizer, step=scheduled.step, steps=trainer.steps)
        has_entries = any(forest.entry_count for forest in forests)
        grad_norm = self._updater.update(lr=lr) if has_entries else 0.0
        totals = group_totals(groups)
        entries = entry_metrics(seen, current_version=self.version)
        self.version += 1
        return StepResult(
            trained=tuple(group.group_id for group in groups),
            failed=failed,
            completion_ids=completion_ids,
            metrics=TrainingMetrics(
                loss=seen.loss,
                grad_norm=grad_norm,
                lr=lr,
                loss_tokens=sum(forest.entry_count for forest in forests),
                tree_tokens=totals.tree_tokens,
                request_tokens=totals.request_tokens,
                append_tokens=totals.append_tokens,
                attention_pairs=totals.attention_pairs,
                ratio_mean=entries.ratio_mean,
                ratio_p99=entries.ratio_p99,
                capped_share=entries.capped_share,
                logprob_gap_mean=entries.gap_mean,
                logprob_gap_max=entries.gap_max,
                kl_k3=entries.kl_k3,
                entropy=entries.entropy,
                staleness_max=totals.staleness_max,
                forward_backward_s=forward_backward_s,
                gap_entries=entries.gap_entries,
            ),
        )

    def _read(
        self, scheduled: ScheduledStep, values: Mapping[str, bytes]
    ) -> tuple[
        tuple[ScheduledGroup, ...],
        list[Forest],
        tuple[tuple[str, str], ...],
        tuple[str, ...],
    ]:
        groups: list[ScheduledGroup] = []
        forests: list[Forest] = []
        failed: list[tuple[str, str]] = []
        completion_ids: list[str] = []
        for group in scheduled.groups:
            try:
                tree = _decoded(group, values.get(group.group_id))
                forest = read_tree(tree)
                self._check_vocabulary(forest)
            except InvalidTreeError as error:
                failed.append((group.group_id, str(error)))
                continue
            groups.append(group)
            forests.append(forest)
            completion_ids.extend(tree.sample_ids)
        return tuple(groups), forests, tuple(failed), tuple(completion_ids)

    def _check_vocabulary(self, forest: Forest) -> None:
        vocabulary = self._loaded.policy.shape.vocabulary
        if forest.tokens_N.min() < 0 or forest.tokens_N.max() >= vocabulary:
            raise InvalidTreeError(f"tokens: ids must be in 0..{vocabulary - 1}")


def _decoded(group: ScheduledGroup, value: bytes | None) -> MergedTree:
    if value is None:
        raise InvalidTreeError("the tree was not read within the deadline")
    sha256 = hashlib.sha256(value).hexdigest()
    if sha256 != group.tree_sha256:
        raise InvalidTreeError(f"the tree has sha256 {sha256}, scheduled was {group.tree_sha256}")
    try:
        tree = topics.decode(topics.MERGED_TREES, value)
    except msgspec.MsgspecError as error:
        raise InvalidTreeError(f"the tree does not decode: {error}") from error
    assert isinstance(tree, MergedTree)
    return tree


def _loss_of(configuration: RunConfiguration) -> LossFunction:
    kind = configuration.loss.kind
    if ":" not in kind:
        return loss_function(configuration.loss)
    module, _, name = kind.partition(":")
    # The user's function is called with our types; its own annotations are not checked.
    user = cast(UserLoss, getattr(importlib.import_module(module), name))
    return loss_function(configuration.loss, user=user)
