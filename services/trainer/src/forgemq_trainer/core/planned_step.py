"""What a step over some trees costs by the plan that trains them: passes, FLOPs, bytes.

A pure function of the trees, the model's shape and the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forgemq_contracts.trainer_plan import PlannedGroup, PlannedStep
from forgemq_trainer.core.assignment import OwnRound, Round, SharedRound
from forgemq_trainer.core.expert_traffic import leaving_bytes, row_bytes
from forgemq_trainer.core.flops import Flops, flops_of_tree, forward_of
from forgemq_trainer.core.memory import Microbatch, ModelShape
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.traffic import (
    GatheredValues,
    Kept,
    RankGrid,
    Traffic,
    UpdatePlan,
    passes_of,
    plan_update,
)
from forgemq_trainer.core.tree import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The trainer's processes.

    Attributes:
        grid: How many, and how they hold the model.
        values: The model's parameters, as they are gathered.
        budget_bytes: Of each, for activations, keys, values and their gradients.
        head_chunk: Rows of logits in memory at once.
    """

    grid: RankGrid
    values: GatheredValues
    budget_bytes: int
    head_chunk: int


def planned_group(forest: Forest, *, shape: ModelShape, ranks: Ranks) -> PlannedGroup:
    """How a group trains alone; without a plan it says why there is none."""
    tokens = forest.token_count
    try:
        (planned,) = _planned([forest], shape=shape, ranks=ranks).rounds
    except ValueError as error:
        return PlannedGroup(tokens=tokens, way="none", refusal=str(error))
    if isinstance(planned, SharedRound):
        return PlannedGroup(
            tokens=tokens,
            way="shared",
            blocks=len(planned.blocks),
            block_tokens=max(block[-1][1] - block[0][0] for block in planned.blocks),
        )
    (batch,) = [each for each in planned.microbatch_of_rank if each is not None]
    return PlannedGroup(
        tokens=tokens,
        way="whole" if len(batch.blocks) == 1 else "blocks",
        blocks=len(batch.blocks),
        block_tokens=max(end - start for start, end in batch.blocks),
        recomputed_layers=batch.recomputed_layers,
        is_offloaded=batch.is_offloaded,
        stored_bytes=tokens * shape.key_bytes_per_token if batch.is_offloaded else 0,
        predicted_bytes=batch.predicted_bytes,
    )


def planned_step(forests: Sequence[Forest], *, shape: ModelShape, ranks: Ranks) -> PlannedStep:
    """The passes, FLOPs and bytes of a step over these trees."""
    whole_tokens = shape.block_tokens(ranks.budget_bytes, chunk=ranks.head_chunk, is_carried=False)
    # Several groups may share a tree.
    different = {id(forest): forest for forest in forests}
    costs = {key: flops_of_tree(shape, forest) for key, forest in different.items()}
    flops = [costs[id(forest)] for forest in forests]
    plan = PlannedStep(
        whole_tokens=whole_tokens,
        key_bytes_per_token=shape.key_bytes_per_token,
        tree_tokens=sum(forest.token_count for forest in forests),
        flops=sum(cost.total for cost in flops),
    )
    try:
        update = _planned(forests, shape=shape, ranks=ranks)
    except ValueError as error:
        return msgspec.structs.replace(plan, refused_step=str(error))
    rounds, traffic = update.rounds, update.traffic
    batches = [batch for each in rounds for batch in _microbatches(each)]
    passes = passes_of(rounds)
    is_shared = any(isinstance(each, SharedRound) for each in rounds)
    return msgspec.structs.replace(
        plan,
        slowest_flops=sum(
            _slowest(each, flops, shape=shape, world_size=ranks.grid.ranks) for each in rounds
        ),
        forwards=passes.forwards,
        backwards=passes.backwards,
        kept=update.kept.name.lower(),
        gathered_bytes=traffic.gathered,
        reduced_bytes=traffic.reduced,
        replicated_bytes=traffic.replicated,
        exchanged_bytes=traffic.exchanged,
        travelled_bytes=sum(_travelled_bytes(each, forests, shape=shape) for each in rounds),
        predicted_bytes=0 if is_shared else max((b.predicted_bytes for b in batches), default=0),
    )


def _planned(forests: Sequence[Forest], *, shape: ModelShape, ranks: Ranks) -> UpdatePlan:
    if ranks.grid.ranks > 1:
        return plan_update(
            forests,
            shape=shape,
            values=ranks.values,
            grid=ranks.grid,
            budget_bytes=ranks.budget_bytes,
            head_chunk=ranks.head_chunk,
        )
    alone = plan_step(
        forests,
        shape=shape,
        budget_bytes=ranks.budget_bytes,
        head_chunk=ranks.head_chunk,
        carried="path",
    )
    rounds = tuple(OwnRound(microbatch_of_rank=(batch,)) for batch in alone)
    return UpdatePlan(rounds=rounds, kept=Kept.NOTHING, traffic=Traffic())


def _microbatches(planned: Round) -> tuple[Microbatch, ...]:
    if isinstance(planned, SharedRound):
        return ()
    return tuple(batch for batch in planned.microbatch_of_rank if batch is not None)


def _slowest(
    planned: Round, flops: Sequence[Flops], *, shape: ModelShape, world_size: int
) -> float:
    if isinstance(planned, SharedRound):
        cost = flops[planned.group]
        return (cost.total + forward_of(cost, shape).total) / world_size
    return max(
        sum(
            flops[group].total
            + (forward_of(flops[group], shape).total if len(batch.blocks) > 1 else 0.0)
            + _recomputation(flops[group], batch.recomputed_layers, shape=shape)
            for group in batch.groups
        )
        for batch in _microbatches(planned)
    )


def _recomputation(cost: Flops, layers: int, *, shape: ModelShape) -> float:
    """Operations of the layers that run their matrix products again in backward.

    Their attention's output is kept on most backends, and the head runs once.
    """
    return forward_of(cost, shape).weights * layers / shape.layers


def _travelled_bytes(planned: Round, forests: Sequence[Forest], *, shape: ModelShape) -> int:
    """Of the rank with most tokens in a round: rows that leave it for experts of other ranks."""
    if shape.expert_ranks == 1:
        return 0
    if isinstance(planned, SharedRound):
        tokens = sum(max(end - start for start, end in block) for block in planned.blocks)
        # Every block runs forward first without gradient.
        sent = row_bytes(shape, tokens=tokens, forwards=2, backwards=1)
    else:
        sent = row_bytes(
            shape,
            tokens=max(
                sum(forests[group].token_count for group in batch.groups)
                for batch in _microbatches(planned)
            ),
            forwards=1,
            backwards=1,
            recomputed_layers=planned.recomputed_layers,
        )
    return leaving_bytes(shape, sent)
