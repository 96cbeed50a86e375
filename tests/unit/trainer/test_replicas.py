"""Ranks that hold the model in shards, once or several times, compute the gradients of one.

Whatever they keep gathered between passes, and with a reference that is in shards too. What they
send is counted, and is what the formula says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.assignment import Round, plan_rounds
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.memory import ModelShape, least_budget_bytes
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.reference import filled, routeless, with_references
from forgemq_trainer.core.rounds import forward_backward_rounds, read_rounds
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.traffic import Kept, passes_of, reading_traffic, update_traffic
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import LoadedModel, prepare
from forgemq_trainer.model_sizes import gathered_values
from forgemq_trainer.ranks.expert_groups import ExpertGroups
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import shard
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, RankPair, RankProcesses
from tests.unit.trainer.scene import agent_samples, make_model, merge
from tests.unit.trainer.sent_bytes import SentBytes
from tests.unit.trainer.test_low_rank import adapted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

CHUNK = 8
HIDDEN = 32
Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One update of a tiny model in float64.

    Attributes:
        world: Number of ranks.
        shards: Of them that hold the model once.
        is_shared: True if the largest groups run in blocks of several ranks; else all run at once.
        kind: Of the model; 63 rows of embedding and head make shards of two sizes.
        is_tied: True if the head's weights are the embedding's.
        has_reference: True if the loss has a KL to another model.
        is_adapted: True if adapters train, of a frozen model.
        expert_ranks: Of the ranks of a replica, those that hold all experts between them.
    """

    world: int
    shards: int
    is_shared: bool
    kind: str = "qwen3"
    is_tied: bool = False
    has_reference: bool = False
    is_adapted: bool = False
    expert_ranks: int = 1


@dataclass(frozen=True)
class Seen:
    """What an update gave: gradients by parameter, and bytes sent as counted and by formula."""

    gradients: Gradients
    sent: tuple[float, float]


def _forests(case: Case) -> tuple[Forest, ...]:
    """A small group, and one for every two ranks that needs blocks, or five that run at once."""
    generator = np.random.default_rng(4)
    count = case.world // 2 if case.is_shared else 5
    large = {"rollouts": 8, "is_stripped": True} if case.is_shared else {"rollouts": 4}
    groups = [agent_samples(generator, turns=4, **large) for _ in range(count)]
    groups += [agent_samples(generator, rollouts=2, turns=1)]
    return tuple(read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(groups))


def _loaded(case: Case) -> LoadedModel:
    sizes = {"vocab_size": 63, "tie_word_embeddings": case.is_tied}
    if case.is_adapted:
        # Experts are one tensor, no linear layer.
        targets = ("k_proj", "o_proj", *(() if case.kind == "qwen3_moe" else ("down_proj",)))
        return adapted(case.kind, torch.float64, *targets, **sizes)
    model = make_model(case.kind, torch.float64, **sizes)
    if case.kind in ("qwen3_moe", "minimax_m2"):
        model.set_experts_implementation("eager")  # The grouped kernel has no float64.
    return prepare(model)


def _reference(case: Case) -> LoadedModel:
    loaded = _loaded(replace(case, is_adapted=False))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.1)
    loaded.model.requires_grad_(requires_grad=False)
    return loaded


def _objective(case: Case, forests: Sequence[Forest]) -> Objective:
    loss = Loss(reference_weight=0.3 if case.has_reference else 0.0)
    return Objective(
        forests=forests,
        loss_weights=group_loss_weights(forests, loss=loss),
        loss=loss_function(loss),
    )


def _rounds(case: Case, forests: Sequence[Forest], shape: ModelShape) -> tuple[Round, ...]:
    """Two rounds of one block; or one for the small group, and blocks, beside idle ranks."""
    largest = max(forest.token_count for forest in forests)
    budget = shape.block_bytes(largest, chunk=CHUNK, is_carried=False)
    if case.is_shared:
        longest = max(int(forest.position_N.max()) + 1 for forest in forests)
        budget = int(1.05 * least_budget_bytes(shape, longest_path=longest, head_chunk=CHUNK))
    rounds = plan_rounds(
        forests, shape=shape, world_size=case.world, budget_bytes=budget, head_chunk=CHUNK
    )
    teams = [team for planned in rounds for team in planned.teams]
    assert any(team.size > 1 and len(team.blocks) > 1 for team in teams) == case.is_shared
    assert case.is_shared or len(rounds) == 2
    return rounds


def _of_rank(ranks: Ranks, case: Case) -> dict[str, Seen]:
    """The same update with everything that may be kept, and a reading of the reference."""
    forests = _forests(case)
    mesh = ranks.mesh(case.shards)
    spread: Any = {"ranks": ranks, "mesh": mesh, "experts": None}
    if case.expert_ranks > 1:
        spread["experts"] = ExpertGroups(ranks, mesh.grid, expert_ranks=case.expert_ranks)
    travelling = spread["experts"] and spread["experts"].peers.group
    held = {"shards": case.shards, "expert_ranks": case.expert_ranks}
    sharded = shard(_loaded(case), dtype=torch.float64, **spread)
    model, shape, grid = sharded.model, sharded.policy.shape, mesh.grid
    values = gathered_values(model, **held)
    rounds = _rounds(case, forests, shape)
    sizes: Any = {"shape": shape, "values": values, "grid": grid, "rank": ranks.rank}
    seen = {}
    if case.has_reference:
        reference = shard(_reference(case), dtype=torch.float64, **spread)
        for kept in Kept:
            with SentBytes(travelling) as sent, reference.gathering.reading(kept):
                read = read_rounds(
                    reference.policy, routeless(forests), rounds, peers=ranks, head_chunk=CHUNK
                )
            of_it = sizes | {"values": gathered_values(reference.model, **held)}
            expected = reading_traffic(rounds, forests, kept=kept, **of_it).total
            seen[f"read, kept {kept.name}"] = Seen({}, (sent.sent_bytes, expected))
        forests = filled(forests, read)
    for kept in Kept:
        backwards = passes_of(rounds).backwards
        with SentBytes(travelling) as sent, sharded.gathering.update(kept, backwards=backwards):
            forward_backward_rounds(
                sharded.policy,
                _objective(case, forests),
                rounds,
                peers=ranks,
                head_chunk=CHUNK,
            )
        expected = update_traffic(rounds, forests, kept=kept, **sizes).total
        seen[kept.name] = Seen(_taken(model), (sent.sent_bytes, expected))
    return seen


def _taken(model: nn.Module) -> Gradients:
    """The whole gradients, which are dropped."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter.grad, DTensor), name
            gradients[name] = parameter.grad.full_tensor()
        parameter.grad = None
    return gradients


def _alone(case: Case) -> Gradients:
    loaded, forests = _loaded(case), _forests(case)
    model, policy = loaded.model, loaded.policy
    microbatches = plan_step(forests, shape=policy.shape, budget_bytes=10**9, head_chunk=CHUNK)
    if case.has_reference:
        reference = _reference(case).policy
        forests = with_references(reference, forests, microbatches, head_chunk=CHUNK)
    forward_backward(policy, _objective(case, forests), microbatches, head_chunk=CHUNK)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CASES = [
    *(Case(4, 2, is_shared, has_reference=near) for is_shared in (False, True) for near in (0, 1)),
    *(Case(4, shards, True, has_reference=True) for shards in (1, 4)),
    *(Case(2, shards, True, has_reference=True) for shards in (1, 2)),
    Case(4, 2, False, "llama", is_tied=True),
    Case(4, 2, False, "qwen3_moe"),
    *(Case(4, 2, is_shared, "qwen3_moe", expert_ranks=2) for is_shared in (False, True)),
    Case(4, 2, True, "minimax_m2", expert_ranks=2, has_reference=True),
    Case(4, 2, True, is_adapted=True, has_reference=True),
    Case(4, 2, True, "qwen3_moe", is_adapted=True, has_reference=True, expert_ranks=2),
    Case(4, 4, False, "qwen3_moe", is_adapted=True, expert_ranks=2),
]


def _name(case: Case) -> str:
    parts = [case.kind, f"{case.world // case.shards} replicas of {case.shards}"]
    parts += ["blocks" if case.is_shared else "at once", "tied" if case.is_tied else ""]
    parts += ["reference" if case.has_reference else "", "adapters" if case.is_adapted else ""]
    parts += [f"experts on {case.expert_ranks}" if case.expert_ranks > 1 else ""]
    return "-".join(filter(None, parts))


EIGHT_RANKS = Case(8, 4, True, "qwen3_moe", expert_ranks=2)
"""Two replicas, in each of which two ranks hold the same half of the experts."""


def _missing_bytes(case: Case, rank: int) -> int:
    """What a rank with a shorter shard of the head sends less to the other replica."""
    is_summed = 1 < case.shards < case.world and not (case.is_tied or case.is_adapted)
    # Of 63 rows the last shard has one less; half of it goes there, and half of the sum back.
    return 8 * HIDDEN if is_summed and rank % case.shards == case.shards - 1 else 0


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_gradients_are_those_of_one_rank_and_bytes_those_of_the_formula(
    case: Case, rank_pair: RankPair, four_ranks: RankProcesses
) -> None:
    _check(case, rank_pair if case.world == 2 else four_ranks)


def test_holders_of_the_same_experts_in_two_replicas_compute_the_gradients_of_one_rank() -> None:
    ranks = RankProcesses(world=EIGHT_RANKS.world)
    try:
        _check(EIGHT_RANKS, ranks)
    finally:
        ranks.close()


def _check(case: Case, ranks: RankProcesses) -> None:
    results = ranks.run(_of_rank, case)
    expected = _alone(case)
    floor = 1e-3 * max(gradient.norm() for gradient in expected.values())
    for name, seen in results[0].items():
        for rank, each in enumerate(results):
            counted, predicted = each[name].sent
            predicted -= 0 if name.startswith("read") else _missing_bytes(case, rank)
            assert counted == pytest.approx(predicted, abs=8), name
        for parameter, gradient in seen.gradients.items():
            wanted = expected[parameter]
            worst = (gradient - wanted).norm() / torch.maximum(wanted.norm(), floor)
            assert float(worst) <= 1e-12, f"{name}: {parameter}"
        # Replicas and shards agree to the bit: all of them take the same update.
        for other in results[1:]:
            for parameter, gradient in other[name].gradients.items():
                assert torch.equal(gradient, seen.gradients[parameter]), f"{name}: {parameter}"
    for kept in Kept:
        assert results[0][kept.name].gradients.keys() == expected.keys()
    updates = [results[0][kept.name].sent[0] for kept in Kept]
    assert updates == sorted(updates, reverse=True)
    # A rank that holds the whole model has only the sums over the replicas to send, and keys.
    assert (updates[-1] < updates[0]) == (case.shards > 1)
