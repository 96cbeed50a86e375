"""Ranks that hold a part of the experts hold the predicted bytes, wherever all tokens travel."""

import gc
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.step import Objective, forward_backward, forward_backward_together
from forgemq_trainer.core.team_plans import TeamPlans
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.ranks.expert_groups import ExpertGroups
from forgemq_trainer.ranks.rank_group import RankGroup
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import ShardedPolicy, shard
from tests.unit.trainer.rank_peak import least_peak_bytes, settled
from tests.unit.trainer.rank_scene import (
    START_DEADLINE_S,
    WORK_DEADLINE_S,
    RankPair,
    RankProcesses,
)
from tests.unit.trainer.scene import agent_samples, make_model, merge
from tests.unit.trainer.test_ranks_experts import CHUNK, prefer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

EXPERTS = 32


def _spread(ranks: Ranks, dtype: torch.dtype, *, chosen: Sequence[int]) -> ShardedPolicy:
    """A model whose tokens all choose these experts."""
    sizes = {"num_local_experts": EXPERTS, "num_experts_per_tok": 8, "intermediate_size": 32}
    wide = {"hidden_size": 128, "head_dim": 32, "rotary_dim": 16, "num_hidden_layers": 4}
    model = make_model("minimax_m2", torch.float32, **(sizes | wide))
    prefer(model, chosen)
    world = ranks.world_size
    groups = ExpertGroups(ranks, ranks.mesh(world).grid, expert_ranks=world)
    assert isinstance(groups.peers, RankGroup)
    groups.peers = settled(groups.peers)
    return shard(prepare(model), ranks=ranks, dtype=dtype, experts=groups)


def _forest(rollouts: int) -> Forest:
    generator = np.random.default_rng(0)
    return read_tree(
        merge(
            agent_samples(
                generator,
                rollouts=rollouts,
                turns=4,
                prompt=60,
                act=20,
                observe=30,
                vocabulary=60,
            ),
            f"g-{rollouts}",
        )
    )


def _objective(forests: Sequence[Forest]) -> Objective:
    return Objective(forests=forests, loss_weights=[1.0] * len(forests), loss=loss_function(Loss()))


def _peak(ranks: Ranks, dtype: torch.dtype, recomputed_layers: int) -> tuple[int, int]:
    """Most bytes that torch held on this rank, and as predicted."""
    policy = _spread(ranks, dtype, chosen=range(8)).policy
    forest = _forest(10)
    microbatch = Microbatch(
        groups=(0,), blocks=((0, forest.token_count),), recomputed_layers=recomputed_layers
    )

    def run() -> None:
        forward_backward(policy, _objective([forest]), [microbatch], head_chunk=CHUNK)

    run()  # Makes the parameters' gradients.
    gc.collect()
    predicted = policy.shape.block_bytes(
        forest.token_count, chunk=CHUNK, is_carried=False, recomputed_layers=recomputed_layers
    )
    return least_peak_bytes(run), predicted


@pytest.mark.parametrize(
    ("dtype", "recomputed_layers"), [(torch.float32, 0), (torch.bfloat16, 2)], ids=["fp32", "bf16"]
)
def test_the_rank_to_which_all_tokens_travel_holds_the_predicted_bytes(
    dtype: torch.dtype, recomputed_layers: int, rank_pair: RankPair
) -> None:
    """Torch counts this tiny model's gathered parameters too, 2 % of the bytes."""
    first, second = rank_pair.run(_peak, dtype, recomputed_layers)
    assert first[0] == pytest.approx(first[1], rel=0.03)
    assert second[0] < 0.6 * second[1]


def _peak_beside(ranks: Ranks) -> tuple[int, int, int]:
    """Most bytes of a rank of two unequal teams, as predicted, and as if its team were alone.

    Half of the rows of all ranks travel to rank 0, fewer than would go in two parts.
    """
    policy = _spread(ranks, torch.float32, chosen=(0, 1, 2, 3, 8, 9, 10, 11)).policy
    forests = [_forest(5), _forest(10)]
    plans = TeamPlans(forests, shape=policy.shape, budget_bytes=10**9, head_chunk=CHUNK)
    alone = [plans.team(each, (n,), count=1) for n, each in enumerate(((0, 2), (2, 4)))]
    beside = plans.beside([team for team in alone if team is not None])
    assert beside is not None
    own = ranks.rank // 2
    team, by_itself = beside[own], alone[own]
    assert by_itself is not None
    peers = settled(ranks.team(team.ranks))

    def run() -> None:
        forward_backward_together(policy, _objective(forests), team, peers=peers, head_chunk=CHUNK)

    run()  # Makes the parameters' gradients.
    gc.collect()
    return least_peak_bytes(run), team.predicted_bytes, by_itself.predicted_bytes


def test_a_rank_of_a_short_team_has_room_for_the_rows_of_a_longer_one_beside_it(
    four_ranks: RankProcesses,
) -> None:
    held, predicted, alone = zip(*four_ranks.run(_peak_beside), strict=True)
    assert alone[0] < held[0] <= predicted[0]
    assert alone[2] == predicted[2]
    assert all(each <= 1.03 * most for each, most in zip(held, predicted, strict=True))
