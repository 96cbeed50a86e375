"""Trains steps: decoded records in, new weights and metrics out.

Knows no log, and no clock but a stopwatch. Runs in a worker thread; one call at a time.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from forgemq_contracts import topics
from forgemq_contracts.gaps import LogprobGap
from forgemq_contracts.queues import supervised_fractions
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import ScheduledGroup, ScheduledStep, TrainingMetrics
from forgemq_contracts.trees import MergedTree
from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.distillation import distilled, kl_teacher
from forgemq_trainer.core.expert_routes import check_expert_routes
from forgemq_trainer.core.flops import savings
from forgemq_trainer.core.metrics import (
    AppliedUpdate,
    Measured,
    entry_metrics,
    gap_of,
    group_totals,
    step_gaps,
    training_metrics,
)
from forgemq_trainer.core.optimizer import learning_rate
from forgemq_trainer.core.probe import probe_of, probe_tokens_max
from forgemq_trainer.core.step import EntryValues
from forgemq_trainer.core.tree import Floats, Forest, InvalidTreeError, joined, read_tree
from forgemq_trainer.head_training import HeadTraining
from forgemq_trainer.heap import keep_freed_memory
from forgemq_trainer.ranks import commands
from forgemq_trainer.ranks.alone import ALONE, Alone, AnyRanks
from forgemq_trainer.ranks.sharded_model import ShardedModel
from forgemq_trainer.start_checks import check_budget, loss_of
from forgemq_trainer.step_updates import StepUpdates, TakenUpdates
from forgemq_trainer.storage.checkpoint import Checkpoint
from forgemq_trainer.version_saving import VersionSaving
from forgemq_trainer.whole_model import WholeModel


class DivergedTrainingError(SettingsError):
    """Too many steps in a row had no finite gradient.

    A SettingsError, so that nothing starts the trainer again: it would train the same step.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStep:
    """A scheduled step whose trees were read: what can train, and what cannot.

    Attributes:
        scheduled: The step's record.
        groups: The groups whose tree is intact, in order.
        forests: Their trees.
        failed: (group id, reason) of the groups left out.
        completion_ids: Request ids of all samples in the trees.
        values: Wire bytes by group id, as they were read.
    """

    scheduled: ScheduledStep
    groups: tuple[ScheduledGroup, ...]
    forests: tuple[Forest, ...]
    failed: tuple[tuple[str, str], ...]
    completion_ids: tuple[str, ...]
    values: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """A step whose first update has its gradients in the parameters, and that one's values."""

    step: ReadStep
    updates: StepUpdates
    first: EntryValues


class Training:
    """The model, the optimizer and the loss of a run.

    An optimizer step is `compute_gradients` and `update`, or `train` if no tree is there to probe.
    Example: a new run is at version 0; `train(step 0)` makes it version 1. Made from the
    checkpoint of step 6 it is at version 7, and continues to the same bytes.

    If there are several ranks, each has one of these, with a shard of the model. Each call on rank
    0's is announced to the others, which then make the same call on theirs.
    """

    def __init__(
        self,
        configuration: RunConfiguration,
        *,
        device: str,
        checkpoint: Checkpoint | None,
        ranks: AnyRanks = ALONE,
    ) -> None:
        """Load the model, from the checkpoint if there is one."""
        checkpoint_folder = "" if checkpoint is None else str(checkpoint.folder)
        ranks.announce(commands.Begin(configuration=configuration, checkpoint=checkpoint_folder))
        torch.set_num_threads(configuration.trainer.threads)
        if device == "cpu":
            keep_freed_memory()
        # Loading may draw random numbers; a checkpoint's state replaces this below.
        torch.manual_seed(configuration.seed)
        self._ranks = ranks
        self._configuration = configuration
        self._device = torch.device(device)
        self._model: WholeModel | ShardedModel = (
            WholeModel(configuration, checkpoint, device=device)
            if isinstance(ranks, Alone)
            else ShardedModel(configuration, checkpoint, ranks=ranks, device=device)
        )
        check_budget(configuration, self._model.policy)
        self._loss = loss_of(configuration)
        self._supervised = frozenset(supervised_fractions(configuration))
        self.version = 0
        self._skipped_in_a_row = 0
        self._computed: _Computed | None = None
        if checkpoint is not None:
            self._skipped_in_a_row = checkpoint.record.trained.metrics.skipped_in_a_row
            self._model.updater.restore(checkpoint.optimizer_state())
            if self.head is not None:
                self.head.restore(checkpoint.head_optimizer_state())
            torch.set_rng_state(checkpoint.random_state())
            self.version = checkpoint.step + 1
        self.random_state = torch.get_rng_state()
        """Torch's random state at `version`: the next step's gradients may draw from it."""
        self.saving = VersionSaving(self._model, ranks, random_state=lambda: self.random_state)

    @property
    def model(self) -> torch.nn.Module:
        """The model at `version`."""
        return self._model.module

    @property
    def head(self) -> HeadTraining | None:
        """The draft head at `version`; None if the run trains none."""
        return self._model.head

    def end(self) -> None:
        """Let the other ranks end; no call may follow."""
        self._ranks.announce(commands.End())

    def read(self, scheduled: ScheduledStep, values: Mapping[str, bytes]) -> ReadStep:
        """Read the step's trees from their wire bytes.

        Args:
            scheduled: The step's record.
            values: Wire bytes by group id; one that is lost, damaged or too large fails its group.
        """
        groups: list[ScheduledGroup] = []
        forests: list[Forest] = []
        failed: list[tuple[str, str]] = []
        completion_ids: list[str] = []
        for group in scheduled.groups:
            try:
                tree = _decode_tree(group, values.get(group.group_id))
                forest = read_tree(tree, is_supervised=tree.domain in self._supervised)
                forest = distilled(forest, self._configuration.distillation)
                if self._ranks.rank == 0:  # It announces only groups that passed.
                    self._check_fits(forest)
                    self._check_plan(forest)
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
        """Take one optimizer step over the trees, without a probe; `version` rises by one."""
        self.compute_gradients(step)
        return self.update(())

    def compute_gradients(self, step: ReadStep) -> None:
        """Run forward and backward of the step's first update; `update` ends the step.

        Raises:
            RankLostError: another rank died or missed its deadline.
            ValueError: the step is not the next one.
        """
        if step.scheduled.step != self.version:
            raise ValueError(
                f"version {self.version} trains step {self.version}, got {step.scheduled.step}"
            )
        values = {group.group_id: step.values[group.group_id] for group in step.groups}
        # The other ranks get only the trees that train here: some groups may have failed, or all.
        self._ranks.announce(commands.ComputeGradients(scheduled=step.scheduled, values=values))
        updates = StepUpdates(
            self._model,
            self._configuration,
            groups=step.groups,
            forests=step.forests,
            loss=self._loss,
        )
        with self._ranks.together(), _current_device(self._device):
            first = updates.begin()
        self._computed = _Computed(step=step, updates=updates, first=first)

    def update(self, fresh: Sequence[bytes], *, is_remade: bool = False) -> TrainingMetrics:
        """Probe the weights once more, then take all updates; `version` rises by one.

        A gradient that is not finite changes no weight; the metrics say so.

        Args:
            fresh: Wire bytes of trees that do not train in this step, best first; those with
                entries of `version` are probed within the probe's budget.
            is_remade: A previous life made `version` too, perhaps with another loss or rate. The
                step's own tokens may be sampled with those weights, so only `fresh` is compared.

        Raises:
            DivergedTrainingError: More than optimizer.skipped_in_a_row_max in a row.
            RankLostError: another rank died or missed its deadline.
            ValueError: no step's gradients were computed.
        """
        if self._computed is None:
            raise ValueError(f"version {self.version} has no gradients to apply")
        self.saving.finish_optimizer()
        computed, self._computed = self._computed, None
        started_s = time.perf_counter()
        used, parts = self._probe_parts(fresh, step=computed.step)
        self._ranks.announce(commands.Update(fresh=used))
        with self._ranks.together(), _current_device(self._device):
            probed = self._probe(joined(parts)) if parts else np.zeros(0)
            probe_s = time.perf_counter() - started_s
            own = step_gaps(computed.first, version=self.version)
            gaps = [probed] if is_remade else [own, probed]
            gap = gap_of(np.concatenate(gaps))
            return self._take_step(computed, gap, probe_s=probe_s)

    def _probe_parts(
        self, fresh: Sequence[bytes], *, step: ReadStep
    ) -> tuple[tuple[bytes, ...], tuple[Forest, ...]]:
        """What of these trees is probed, and the bytes of the trees that have it."""
        step_tokens = sum(forest.token_count for forest in step.forests)
        left = probe_tokens_max(step_tokens // self._ranks.world_size)
        used, parts = [], []
        for value in fresh:
            try:
                forest = read_tree(_decode(value))
                self._check_fits(forest)
            except InvalidTreeError:
                continue  # The step that it is scheduled for fails it and says why.
            part = probe_of(forest, version=self.version, tokens_max=left)
            if part is not None:
                used.append(value)
                parts.append(part)
                left -= part.token_count
        return tuple(used), tuple(parts)

    def _probe(self, forest: Forest) -> Floats:
        """|trainer - engine| of a probe's entries, nats."""
        return np.asarray(np.abs(self._model.read_logprobs(forest) - forest.entry_logprob_E))

    def _take_step(
        self, computed: _Computed, gap: LogprobGap | None, *, probe_s: float
    ) -> TrainingMetrics:
        step = computed.step
        lr = learning_rate(
            self._configuration.optimizer,
            step=self.version,
            steps=self._configuration.trainer.steps,
        )
        taken = computed.updates.take(lr=lr)
        self._count_skipped(taken)
        metrics = training_metrics(
            entry_metrics(taken.values, passes=self._configuration.updates.passes),
            group_totals(step.groups, route_disagreements=taken.values.route_disagreements),
            savings(self._model.policy.shape, step.forests),
            update=AppliedUpdate(
                lr=lr,
                grad_norm=taken.grad_norm,
                skipped_in_a_row=self._skipped_in_a_row,
                updates=len(taken.grad_norms),
                updates_skipped=taken.skipped,
            ),
            measured=Measured(
                gap=gap,
                forward_backward_s=taken.compute_s,
                probe_s=probe_s,
                draft=taken.draft,
                kl_teacher=kl_teacher(step.forests),
                idle_share=taken.idle_share,
            ),
        )
        self.version += 1
        self.random_state = torch.get_rng_state()
        return metrics

    def _count_skipped(self, taken: TakenUpdates) -> None:
        """Count a step none of whose updates changed the weights, and end the run after too many.

        The step cannot be changed: a restart would train it again and find the same.
        """
        if taken.grad_norms:
            self._skipped_in_a_row = 0
        if taken.grad_norms or not taken.skipped:
            return
        self._skipped_in_a_row += 1
        skipped_max = self._configuration.optimizer.skipped_in_a_row_max
        if self._skipped_in_a_row > skipped_max:
            raise DivergedTrainingError(
                f"{self._skipped_in_a_row} steps in a row up to step {self.version} had no "
                f"finite gradient; optimizer.skipped_in_a_row_max is {skipped_max}. Resume "
                "with another loss or a lower optimizer.lr, or raise the limit"
            )

    def _check_plan(self, forest: Forest) -> None:
        """Plan the tree alone: what fits alone fits among others, which run before or after it.

        Raises:
            InvalidTreeError: No plan of this tree fits the memory budget.
        """
        try:
            self._model.plan((forest,))
        except ValueError as error:
            raise InvalidTreeError(str(error)) from error

    def _check_fits(self, forest: Forest) -> None:
        policy = self._model.policy
        vocabulary = policy.shape.vocabulary
        check_expert_routes(forest, policy.shape)
        if forest.tokens_N.min() < 0 or forest.tokens_N.max() >= vocabulary:
            raise InvalidTreeError(f"tokens: ids must be in 0..{vocabulary - 1}")


def _current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current one.

    Otherwise torch calls that name no device would initialise cuda:0, whichever GPU this rank has.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _decode_tree(group: ScheduledGroup, value: bytes | None) -> MergedTree:
    if value is None:
        raise InvalidTreeError("the tree is not on the log, or its blob is lost")
    sha256 = hashlib.sha256(value).hexdigest()
    if sha256 != group.tree_sha256:
        raise InvalidTreeError(f"the tree has sha256 {sha256}, scheduled was {group.tree_sha256}")
    return _decode(value)


def _decode(value: bytes) -> MergedTree:
    try:
        tree = topics.decode(topics.MERGED_TREES, value)
    except msgspec.MsgspecError as error:
        raise InvalidTreeError(f"the tree does not decode: {error}") from error
    assert isinstance(tree, MergedTree)
    return tree
