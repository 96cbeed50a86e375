"""What a step over some trees costs by the plan that trains them: passes, FLOPs, bytes.

A pure function of the trees, the model's shape and the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from forgemq_contracts.trainer_plan import PlannedGroup, PlannedStep
from forgemq_trainer.core.assignment import Round, idle_share
from forgemq_trainer.core.draft_flops import draft_flops
from forgemq_trainer.core.expert_traffic import leaving_bytes, row_bytes
from forgemq_trainer.core.flops import flops_of_tree
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.team_plans import TeamPlans
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
    (team,) = planned.teams
    way: Literal["whole", "blocks", "shared"] = "whole" if len(team.blocks) == 1 else "blocks"
    return PlannedGroup(
        tokens=tokens,
        way="shared" if team.size > 1 else way,
        ranks=team.size,
        blocks=len(team.blocks),
        block_tokens=max(block[-1][1] - block[0][0] for block in team.blocks),
        recomputed_layers=team.recomputed_layers,
        is_offloaded=team.is_offloaded,
        stored_bytes=tokens * shape.key_bytes_per_token if team.is_offloaded else 0,
        predicted_bytes=team.predicted_bytes,
    )


def planned_step(forests: Sequence[Forest], *, shape: ModelShape, ranks: Ranks) -> PlannedStep:
    """The passes, FLOPs and bytes of a step over these trees."""
    whole_tokens = shape.block_tokens(ranks.budget_bytes, chunk=ranks.head_chunk, is_carried=False)
    # Several groups may share a tree.
    different = {id(forest): forest for forest in forests}
    costs = {
        key: flops_of_tree(shape, forest).total
        + float(draft_flops(shape.draft, forest.position_N).trained_N.sum())
        for key, forest in different.items()
    }
    plan = PlannedStep(
        whole_tokens=whole_tokens,
        key_bytes_per_token=shape.key_bytes_per_token,
        tree_tokens=sum(forest.token_count for forest in forests),
        flops=sum(costs[id(forest)] for forest in forests),
    )
    try:
        update = _planned(forests, shape=shape, ranks=ranks)
    except ValueError as error:
        return msgspec.structs.replace(plan, refused_step=str(error))
    rounds, traffic = update.rounds, update.traffic
    passes = passes_of(rounds)
    predicted = (team.predicted_bytes for each in rounds for team in each.teams)
    return msgspec.structs.replace(
        plan,
        slowest_flops=sum(sum(each.slowest) for each in rounds),
        idle_share=idle_share(rounds, world_size=ranks.grid.ranks),
        forwards=passes.forwards,
        backwards=passes.backwards,
        kept=update.kept.name.lower(),
        gathered_bytes=traffic.gathered,
        reduced_bytes=traffic.reduced,
        replicated_bytes=traffic.replicated,
        exchanged_bytes=traffic.exchanged,
        travelled_bytes=sum(_travelled_bytes(each, shape=shape) for each in rounds),
        predicted_bytes=max(predicted, default=0),
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
    budget_bytes, head_chunk = ranks.budget_bytes, ranks.head_chunk
    alone = plan_step(forests, shape=shape, budget_bytes=budget_bytes, head_chunk=head_chunk)
    plans = TeamPlans(forests, shape=shape, budget_bytes=budget_bytes, head_chunk=head_chunk)
    rounds = tuple(Round(teams=(plans.alone(batch),)) for batch in alone)
    return UpdatePlan(rounds=rounds, kept=Kept.NOTHING, traffic=Traffic())


def _travelled_bytes(planned: Round, *, shape: ModelShape) -> int:
    """Of the rank with most tokens in a round: rows that leave it for experts of other ranks."""
    if shape.expert_ranks == 1:
        return 0
    # Of every pass the longest range; ranks without a team run two tokens.
    passes = zip(*(team.blocks for team in planned.teams), strict=True)
    tokens = sum(max(end - start for block in blocks for start, end in block) for blocks in passes)
    sent = row_bytes(
        shape,
        tokens=tokens,
        # Before its backward, a group in blocks runs once without gradient.
        forwards=1 if planned.block_count == 1 else 2,
        backwards=1,
        recomputed_layers=planned.recomputed_layers,
    )
    return leaving_bytes(shape, sent)
