"""The model of a trainer with several ranks: each rank holds a shard of every parameter."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from forgemq_contracts.lora import publishes_adapters
from forgemq_contracts.rank_rules import shard_ranks_of
from forgemq_contracts.run import RunConfiguration
from forgemq_trainer.core.assignment import Round, idle_share
from forgemq_trainer.core.low_rank import merge_factors
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.reference import filled, read_logprobs, routeless
from forgemq_trainer.core.remembered_plans import RememberedPlans
from forgemq_trainer.core.rounds import (
    forward_backward_rounds,
    read_rounds,
    values_bytes,
    values_of,
)
from forgemq_trainer.core.step import EntryValues, Objective, merged
from forgemq_trainer.core.traffic import Kept, UpdatePlan, passes_of, plan_update
from forgemq_trainer.core.tree import Floats, Forest
from forgemq_trainer.head_training import SharingRanks, load_head
from forgemq_trainer.loading import fill, fill_adapters
from forgemq_trainer.model import DTYPES, LoadedModel, load_empty, with_adapters
from forgemq_trainer.model_sizes import gathered_values
from forgemq_trainer.ranks.expert_groups import expert_groups
from forgemq_trainer.ranks.part_saving import PartSaving
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharded_updater import ShardedUpdater
from forgemq_trainer.ranks.sharding import (
    FsdpShards,
    ShardedPolicy,
    shard,
    whole_ends,
    whole_factors,
    whole_state,
)
from forgemq_trainer.storage.checkpoint import Checkpoint
from forgemq_trainer.storage.optimizer_state import RANDOM_STATE, StatePart, whole_parts
from forgemq_trainer.storage.weights import WholeVersion


class ShardedModel:
    """One rank's shards of model and optimizer; every method but `plan` is collective.

    Attributes:
        head: A draft head, whole on each rank; None if the run trains none.
    """

    def __init__(
        self,
        configuration: RunConfiguration,
        checkpoint: Checkpoint | None,
        *,
        ranks: Ranks,
        device: str,
    ) -> None:
        """Load what a checkpoint holds, else the base model, and keep this rank's shard."""
        self.idle_share = 0.0
        """Of the plan of the newest `forward_backward`."""
        self._ranks = ranks
        self._trainer = configuration.trainer
        self._lora = configuration.lora
        self._dtype = DTYPES[configuration.model.dtype]
        self._sharded = _load_shard(configuration, checkpoint, ranks=ranks, device=device)
        self.module = self._sharded.model
        self.head = load_head(
            self._sharded,
            configuration,
            checkpoint,
            sharing=SharingRanks(
                gather_ends=partial(whole_ends, self.module, dtype=self._dtype),
                all_reduce=ranks.all_reduce,
            ),
        )
        self.policy = self._sharded.policy if self.head is None else self.head.policy
        self._values = gathered_values(
            self.module,
            shards=self._sharded.mesh.grid.shards,
            expert_ranks=configuration.trainer.expert_ranks,
        )
        self._plans = RememberedPlans(self._new_plan)
        self._reference = _load_reference(configuration, ranks=ranks, device=device)
        shards = FsdpShards(ranks, self._sharded.mesh, dtype=self._dtype)
        self.updater = ShardedUpdater(self.module, configuration.optimizer, shards=shards)
        self._random_state = torch.empty(0)
        self._saving = PartSaving(ranks, self._parts)

    def forward_backward(self, objective: Objective) -> EntryValues:
        """Add this rank's part of the objective's gradients.

        Returns:
            On rank 0 the values of all entries; on the others those of their own.
        """
        plan = self._plans.of(objective.forests)
        self.idle_share = idle_share(plan.rounds, world_size=self._ranks.world_size)
        backwards = passes_of(plan.rounds).backwards
        drafting = None if self.head is None else self.head.drafting(objective.forests)
        with self._sharded.gathering.update(plan.kept, backwards=backwards):
            own = forward_backward_rounds(
                self.policy,
                objective,
                plan.rounds,
                peers=self._ranks,
                head_chunk=self._trainer.head_chunk_tokens,
                drafting=drafting,
            )
        everyones = self._ranks.gather_bytes(values_bytes(own))
        return merged([values_of(part) for part in everyones]) if everyones else own

    def with_references(self, forests: tuple[Forest, ...]) -> tuple[Forest, ...]:
        """The forests with the reference's log-probabilities, as they are without a reference."""
        if self._reference is None:
            return forests
        return filled(forests, self._read(self._reference, routeless(forests)))

    def read_forests(self, forests: Sequence[Forest]) -> list[Floats]:
        """Log-probability of each entry of each forest, nats, the same on every rank."""
        return self._read(self._sharded, forests)

    def _read(self, sharded: ShardedPolicy, forests: Sequence[Forest]) -> list[Floats]:
        plan = self._plans.of(forests)
        with sharded.gathering.reading(plan.kept):
            return read_rounds(
                sharded.policy,
                forests,
                plan.rounds,
                peers=self._ranks,
                head_chunk=self._trainer.head_chunk_tokens,
            )

    def plan(self, forests: Sequence[Forest]) -> tuple[Round, ...]:
        """The rounds of a step over these trees, the same on every rank.

        Raises:
            ValueError: The memory budget is below the least that one of them needs.
        """
        return self._plans.of(forests).rounds

    def _new_plan(self, forests: Sequence[Forest]) -> UpdatePlan:
        return plan_update(
            forests,
            shape=self.policy.shape,
            values=self._values,
            grid=self._sharded.mesh.grid,
            budget_bytes=self._trainer.memory_budget_bytes,
            head_chunk=self._trainer.head_chunk_tokens,
        )

    def read_logprobs(self, forest: Forest) -> Floats:
        """Log-probability of each entry, nats; every rank runs the whole forest."""
        (microbatch,) = plan_step(
            (forest,),
            shape=self.policy.shape,
            budget_bytes=self._trainer.memory_budget_bytes,
            head_chunk=self._trainer.head_chunk_tokens,
        )
        with self._sharded.gathering.reading(Kept.NOTHING):
            return read_logprobs(
                self.policy, forest, microbatch, head_chunk=self._trainer.head_chunk_tokens
            )

    def begin_optimizer(self, random_state: Tensor) -> None:
        """Let this rank's part of the optimizer's state be written until the next update."""
        self._random_state = random_state
        self._saving.begin()

    def save_optimizer(self, folder: Path) -> dict[str, str]:
        """On rank 0, have all parts written below a folder; returns each file's SHA-256.

        Not collective: the other ranks' threads take part, and no rank waits for another's step.
        """
        return self._saving.lead(folder)

    def finish_optimizer(self) -> None:
        """Wait until this rank's part is written, if that was begun; not collective."""
        self._saving.finish()

    def _parts(self) -> dict[str, StatePart]:
        parts = self.updater.parts()
        if self._ranks.rank == 0:
            parts |= whole_parts({RANDOM_STATE: self._random_state})
        return parts

    def whole_version(self) -> WholeVersion:
        """What is saved of the weights, in host memory of rank 0; empty on the others."""
        if self._sharded.mesh.replica > 0:
            return WholeVersion()
        is_kept = self._ranks.rank == 0
        if self._lora is None:
            state = whole_state(self.module, dtype=self._dtype, is_kept=is_kept)
            return WholeVersion(weights=state)
        factors = whole_factors(self.module, dtype=self._dtype, is_kept=is_kept)
        if publishes_adapters(self._lora):
            return WholeVersion(adapter=factors)
        state = whole_state(self.module, dtype=self._dtype, is_kept=is_kept)
        merge_factors(state, scale=self._lora.scale)
        return WholeVersion(weights=state, adapter=factors)


def _load_shard(
    configuration: RunConfiguration, checkpoint: Checkpoint | None, *, ranks: Ranks, device: str
) -> ShardedPolicy:
    """This rank's shard of the policy; neither host nor device holds more than it.

    What trains has fp32 masters, which are the shards; frozen weights have the model's dtype.
    """
    model, lora = configuration.model, configuration.lora
    if lora is None:
        folder = Path(model.path) if checkpoint is None else checkpoint.folder
        empty = load_empty(folder, dtype="float32", device=device)
    else:
        folder = Path(model.path)
        empty = load_empty(folder, dtype=model.dtype, device=device)
        empty = with_adapters(empty, lora, dtype=torch.float32)
    loaded = _shard(empty, configuration, ranks=ranks)
    fill(loaded.model, folder)
    if lora is not None:
        adapter = None if checkpoint is None else checkpoint.adapter_folder
        fill_adapters(loaded.model, adapter, seed=configuration.seed)
    return loaded


def _load_reference(
    configuration: RunConfiguration, *, ranks: Ranks, device: str
) -> ShardedPolicy | None:
    """This rank's shard of the model that the run started from; None without a reference."""
    if not configuration.loss.reference_weight:
        return None
    folder, dtype = Path(configuration.model.path), configuration.model.dtype
    empty = load_empty(folder, dtype=dtype, device=device)
    # Without gradients there are no masters, and autograd saves no activations.
    empty.model.requires_grad_(requires_grad=False)
    sharded = _shard(empty, configuration, ranks=ranks)
    fill(sharded.model, folder)
    return sharded


def _shard(empty: LoadedModel, configuration: RunConfiguration, *, ranks: Ranks) -> ShardedPolicy:
    """Give this rank its shard of a model on the meta device, as the configuration divides it."""
    trainer = configuration.trainer
    mesh = ranks.mesh(shard_ranks_of(trainer))
    return shard(
        empty,
        ranks=ranks,
        dtype=DTYPES[configuration.model.dtype],
        mesh=mesh,
        experts=expert_groups(empty.model.config, trainer, ranks=ranks, grid=mesh.grid),
    )
