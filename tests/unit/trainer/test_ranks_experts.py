"""Ranks between which tokens travel to their experts compute the gradients of one rank."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgemq_contracts.loss import Loss
from forgemq_contracts.run import Optimizer
from forgemq_trainer.core.assignment import Round, plan_rounds
from forgemq_trainer.core.expert_traffic import row_bytes
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.memory import ModelShape, least_budget_bytes
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.optimizer import Updater
from forgemq_trainer.core.reference import filled, routeless, with_references
from forgemq_trainer.core.rounds import (
    forward_backward_rounds,
    read_rounds,
    values_bytes,
    values_of,
)
from forgemq_trainer.core.spread_experts import ROWS_RATIO, ExpertPeers
from forgemq_trainer.core.step import Objective, forward_backward, merged
from forgemq_trainer.core.team_plans import TeamPlans
from forgemq_trainer.core.traffic import Kept
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import LoadedModel, prepare
from forgemq_trainer.ranks.expert_groups import ExpertGroups
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharded_updater import ShardedUpdater
from forgemq_trainer.ranks.sharding import FsdpShards, ShardedPolicy, shard, whole_state
from tests.unit.trainer.rank_scene import (
    START_DEADLINE_S,
    WORK_DEADLINE_S,
    RankPair,
    RankProcesses,
)
from tests.unit.trainer.scene import agent_samples, make_model, merge, routed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

CHUNK = 8
LAYERS, TOP_K, EXPERTS = 2, 2, 8
EXPERTS_OF_FAMILY = {
    "qwen3_moe": {"num_experts": EXPERTS},
    "glm4_moe": {"n_routed_experts": EXPERTS},
    "deepseek_v3": {"n_routed_experts": EXPERTS},
    "minimax_m2": {"num_local_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS},
}

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One step of a mixture.

    Attributes:
        kind: Of the model.
        expert_ranks: Ranks that hold all experts between them.
        plan: Each rank runs groups of its `own`, with layers `recomputed` or not, or all ranks run
            them `together`; or they run in `blocks`, as the budget has room; or teams of half of
            the ranks run `beside` each other, or `beside in blocks`.
        routes: `recorded`, or `chosen` by the trainer's routers, or chosen by routers that prefer
            the `first` two experts, so that the first rank of a group gets all rows.
        dtype: That it computes in.
        has_reference: True if the loss has a KL to another model, whose experts are spread too.
    """

    kind: str = "qwen3_moe"
    expert_ranks: int = 2
    plan: str = "own"
    routes: str = "recorded"
    dtype: torch.dtype = torch.float64
    has_reference: bool = False


def _forests(case: Case) -> list[Forest]:
    """Five groups, the first four about as large."""
    generator = np.random.default_rng(3)
    samples = [agent_samples(generator, rollouts=5, turns=4) for _ in range(4)]
    samples.append(agent_samples(generator, rollouts=2))
    trees = [merge(each, f"g-{n}") for n, each in enumerate(samples)]
    if case.routes == "recorded":
        trees = [routed(tree, layers=LAYERS, top_k=TOP_K, experts=EXPERTS) for tree in trees]
    return [read_tree(tree) for tree in trees]


def prefer(model: nn.Module, experts: Sequence[int]) -> None:
    """Make every token choose these experts."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[list(experts)] += 10.0


def _model(case: Case) -> nn.Module:
    model = make_model(case.kind, case.dtype, **EXPERTS_OF_FAMILY[case.kind])
    if case.dtype == torch.float64:  # The grouped kernel has no float64.
        model.set_experts_implementation("eager")
    if case.routes == "first":
        prefer(model, range(TOP_K))
    return model


def _reference(case: Case) -> LoadedModel:
    model = _model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.requires_grad_(requires_grad=False)
    return prepare(model)


def _objective(case: Case, forests: Sequence[Forest]) -> Objective:
    weight = 0.3 if case.has_reference else 0.0
    return Objective(
        forests=forests,
        loss_weights=group_loss_weights(forests, loss=Loss()),
        loss=loss_function(Loss(ratio_cap=1.5, reference_weight=weight)),
    )


def _rounds(case: Case, forests: list[Forest], shape: ModelShape, world: int) -> tuple[Round, ...]:
    """Rounds of the case's plan; of own groups the last leaves ranks without one."""
    if case.plan == "blocks":
        longest = max(int(forest.position_N.max()) + 1 for forest in forests)
        least = least_budget_bytes(shape, longest_path=longest, head_chunk=CHUNK)
        return plan_rounds(
            forests, shape=shape, world_size=world, budget_bytes=int(1.1 * least), head_chunk=CHUNK
        )
    budget = 10**9
    if case.plan == "recomputed":
        largest = max(forest.token_count for forest in forests)
        budget = shape.block_bytes(largest, chunk=CHUNK, is_carried=False, recomputed_layers=1)
    plans = TeamPlans(forests, shape=shape, budget_bytes=budget, head_chunk=CHUNK)
    if case.plan.startswith("beside"):
        count = 2 if case.plan == "beside in blocks" else 1
        halves = ((0, world // 2), (0, 1, 2)), ((world // 2, world), (3, 4))
        teams = [plans.team(ranks, groups, count=count) for ranks, groups in halves]
        return (Round(teams=tuple(team for team in teams if team)),)
    if case.plan == "together":
        team = plans.team((0, world), tuple(range(len(forests))), count=1)
        assert team is not None
        return (Round(teams=(team,)),)
    order = [4, 0, 1, 2, 3]  # The small group beside a large one, of which layers are recomputed.
    rounds = []
    for first in range(0, len(order), world):
        groups = enumerate(order[first : first + world])
        teams = [plans.team((rank, rank + 1), (group,), count=1) for rank, group in groups]
        rounds.append(Round(teams=plans.recomputing_alike([team for team in teams if team])))
    return tuple(rounds)


OPTIMIZER = Optimizer(lr=1e-2, grad_norm_max=1e-2, eps=1e-3)
"""So small a norm clips every gradient; `eps` exceeds the rounding of those that should be 0."""


@dataclass(frozen=True)
class Seen:
    """What a step gave: gradients and updated weights by parameter, norm before clipping, loss."""

    gradients: Tensors
    weights: Tensors
    norm: float
    loss: float


def _alone(case: Case) -> Seen:
    model, forests = _model(case), tuple(_forests(case))
    policy = prepare(model).policy
    microbatches = plan_step(forests, shape=policy.shape, budget_bytes=10**9, head_chunk=CHUNK)
    if case.has_reference:
        reference = _reference(case).policy
        forests = with_references(reference, forests, microbatches, head_chunk=CHUNK)
    objective = _objective(case, forests)
    values = forward_backward(policy, objective, microbatches, head_chunk=CHUNK)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = Updater(model, OPTIMIZER).update(lr=1e-2)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Seen(gradients, weights, norm, values.loss)


class CountingPeers:
    """An expert group that counts the bytes of the rows that this rank gives, to itself too."""

    def __init__(self, peers: ExpertPeers) -> None:
        self._peers = peers
        self.rank, self.world_size = peers.rank, peers.world_size
        self.sent_bytes = 0

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """As of the ranks."""
        return self._peers.all_gather(own)

    def swap(self, own: Tensor, *, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """As of the ranks."""
        self.sent_bytes += own.nbytes
        return self._peers.swap(own, given=given, taken=taken)


def _planned_bytes(
    rounds: tuple[Round, ...], shape: ModelShape, *, world: int, is_read: bool = False
) -> int:
    """Bytes of the rows that all ranks send in these rounds, or to read without gradients."""
    found = 0
    for planned, rank in itertools.product(rounds, range(world)):
        team, count = planned.team_of(rank), planned.block_count
        tokens = 2 * count  # Of a rank without a team.
        if team is not None:
            own = [block[rank - team.ranks[0]] for block in team.blocks]
            tokens = sum(end - start for start, end in own)
        found += row_bytes(
            shape,
            tokens=tokens,
            # Several blocks first run without gradient.
            forwards=1 if count == 1 or is_read else 2,
            backwards=0 if is_read else 1,
            recomputed_layers=planned.recomputed_layers,
        )
    return found


def _assert_planned(case: Case, rounds: tuple[Round, ...], *, world: int) -> None:
    """That the rounds are of the case's plan."""
    sizes = {team.size for planned in rounds for team in planned.teams}
    of_plan = {"together": world, "beside": 2, "beside in blocks": 2}
    assert case.plan == "blocks" or sizes == {of_plan.get(case.plan, 1)}
    assert any(planned.block_count > 1 for planned in rounds) == ("blocks" in case.plan)
    assert any(planned.recomputed_layers for planned in rounds) == (case.plan == "recomputed")


def _has_parts(case: Case) -> bool:
    return case.routes == "first" and case.expert_ranks > ROWS_RATIO


def _spread(ranks: Ranks, case: Case, loaded: LoadedModel) -> tuple[ShardedPolicy, CountingPeers]:
    grid = ranks.mesh(ranks.world_size).grid
    groups = ExpertGroups(ranks, grid, expert_ranks=case.expert_ranks)
    groups.peers = peers = CountingPeers(groups.peers)
    return shard(loaded, ranks=ranks, dtype=case.dtype, experts=groups), peers


def _with_references(
    ranks: Ranks, case: Case, forests: list[Forest], rounds: tuple[Round, ...]
) -> Sequence[Forest]:
    """The forests with what the ranks read of them with the reference, if there is one."""
    if not case.has_reference:
        return forests
    reference, peers = _spread(ranks, case, _reference(case))
    with reference.gathering.reading(Kept.NOTHING):
        read = read_rounds(
            reference.policy, routeless(forests), rounds, peers=ranks, head_chunk=CHUNK
        )
    sent = int(ranks.all_reduce(torch.tensor(peers.sent_bytes)))
    shape, world = reference.policy.shape, ranks.world_size
    assert sent == _planned_bytes(rounds, shape, world=world, is_read=True)
    return filled(forests, read)


def _of_rank(ranks: Ranks, case: Case) -> Seen | None:
    model, forests = _model(case), _forests(case)
    sharded, peers = _spread(ranks, case, prepare(model))
    policy = sharded.policy
    rounds = _rounds(case, forests, policy.shape, ranks.world_size)
    _assert_planned(case, rounds, world=ranks.world_size)
    objective = _objective(case, _with_references(ranks, case, forests, rounds))
    values = forward_backward_rounds(policy, objective, rounds, peers=ranks, head_chunk=CHUNK)
    everyones = ranks.gather_bytes(values_bytes(values))
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.to_local().numel() * ranks.world_size == parameter.numel(), name
        gradients[name] = parameter.grad.full_tensor()
    sent = int(ranks.all_reduce(torch.tensor(peers.sent_bytes)))
    planned = _planned_bytes(rounds, policy.shape, world=ranks.world_size)
    # Four times the rows of an even spread travel in parts, which go once more in backward.
    assert sent > planned if _has_parts(case) else sent == planned
    shards = FsdpShards(ranks, sharded.mesh, dtype=case.dtype)
    norm = ShardedUpdater(model, OPTIMIZER, shards=shards).update(lr=1e-2)
    weights = whole_state(model, dtype=case.dtype, is_kept=ranks.rank == 0)
    if ranks.rank > 0:
        return None
    trained = {name: weights[name] for name in gradients}
    return Seen(gradients, trained, norm, merged([values_of(each) for each in everyones]).loss)


def worst(found: Tensors, expected: Tensors) -> float:
    """Largest ||difference|| / ||expected||, with norms of at least a thousandth of the largest."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(tensor.norm() for tensor in expected.values())
    return max(
        float((found[n] - expected[n]).norm() / torch.maximum(expected[n].norm(), floor))
        for n in expected
    )


def _check(case: Case, processes: RankProcesses) -> None:
    found, *_ = processes.run(_of_rank, case)
    expected = _alone(case)
    bound = 1e-12 if case.dtype == torch.float64 else 1e-5
    assert worst(found.gradients, expected.gradients) <= bound
    assert found.norm == pytest.approx(expected.norm, rel=bound)
    assert found.loss == pytest.approx(expected.loss, rel=max(bound, 1e-12))
    # Adam divides by the gradient, so what is rounding there decides signs in float32.
    if case.dtype == torch.float64:
        assert worst(found.weights, expected.weights) <= bound


def _name(case: Case) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    near = "-reference" if case.has_reference else ""
    return f"{case.kind}-{case.expert_ranks}-{case.plan}-{case.routes}-{dtype}{near}"


ON_TWO = [
    Case(plan="own", routes="chosen"),
    Case(plan="together"),
    *(Case(plan=plan) for plan in ("recomputed", "blocks")),
    *(Case(kind, plan="recomputed") for kind in ("glm4_moe", "gpt_oss")),
    *(Case(kind, plan="blocks", routes="chosen") for kind in ("deepseek_v3", "minimax_m2")),
    Case(dtype=torch.float32, plan="recomputed"),
    *(Case(plan=plan, has_reference=True) for plan in ("recomputed", "blocks")),
]
ON_FOUR = [
    Case(expert_ranks=2, plan="recomputed"),
    Case("glm4_moe", expert_ranks=2, plan="own", routes="chosen"),
    *(Case("minimax_m2", expert_ranks=4, plan=p, routes="first") for p in ("recomputed", "blocks")),
    Case("deepseek_v3", expert_ranks=2, plan="recomputed", routes="first"),
    Case("gpt_oss", expert_ranks=4, plan="together", routes="chosen"),
    Case("glm4_moe", expert_ranks=2, plan="own", has_reference=True),
    Case("deepseek_v3", expert_ranks=4, plan="together", has_reference=True),
    *(
        Case("minimax_m2", expert_ranks=4, plan=p, routes="first")
        for p in ("beside", "beside in blocks")
    ),
    Case("gpt_oss", expert_ranks=2, plan="beside"),
    Case(expert_ranks=4, plan="beside in blocks", has_reference=True),
]


@pytest.mark.parametrize("case", ON_TWO, ids=_name)
def test_gradients_of_two_ranks_with_half_of_the_experts_each_are_those_of_one(
    case: Case, rank_pair: RankPair
) -> None:
    _check(case, rank_pair)


@pytest.mark.parametrize("case", ON_FOUR, ids=_name)
def test_gradients_of_four_ranks_are_those_of_one_also_if_most_get_no_token(
    case: Case, four_ranks: RankProcesses
) -> None:
    _check(case, four_ranks)
