"""Two ranks compute the gradients of one, for every model, loss and kind of round."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.assignment import Round
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.rounds import forward_backward_rounds, values_bytes, values_of
from forgemq_trainer.core.step import EntryValues, Objective, forward_backward, merged
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import shard
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, RankPair
from tests.unit.trainer.scene import (
    adversarial_samples,
    agent_samples,
    make_model,
    merge,
    reinforce,
    routed,
    with_one_disagreement,
)
from tests.unit.trainer.team_scene import team_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

CHUNK = 8
TOP_K, EXPERTS = 2, 4

Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One step of some model.

    Attributes:
        kind: Of the model.
        dtype: That it computes in.
        loss: Its name, or `user`.
        plan: The kind of rounds in which the ranks run it.
        normalisation: Of the loss.
        is_routed: True if the groups have the engine's expert routes.
        is_grouped: True if experts run in the grouped kernel, as in the service.
        vocabulary: Rows of the head; an odd number makes shards of two sizes.
    """

    kind: str = "qwen3"
    dtype: torch.dtype = torch.float64
    loss: str = "cispo"
    plan: str = "own"
    normalisation: str = "step"
    is_routed: bool = False
    is_grouped: bool = False
    vocabulary: int = 64


@dataclass(frozen=True)
class Seen:
    """Results of a step: gradients by parameter, and the values of its entries."""

    gradients: Gradients
    values: EntryValues


def _forests(case: Case) -> list[Forest]:
    """Groups of 267, about 200, 88 and 14 tokens; the last is that of `adversarial_samples`."""
    generator = np.random.default_rng(3)
    groups = [
        agent_samples(generator),
        adversarial_samples(generator),
        agent_samples(generator, rollouts=6, turns=4, is_stripped=True),
        agent_samples(generator, rollouts=5, turns=4),
    ]
    trees = [merge(samples, f"g-{n}") for n, samples in enumerate(groups)]
    if case.is_routed:
        trees = [routed(tree, layers=2, top_k=TOP_K, experts=EXPERTS) for tree in trees]
        trees = [with_one_disagreement(tree, experts=EXPERTS) for tree in trees]
    return [read_tree(tree) for tree in trees]


def _model(case: Case) -> nn.Module:
    model = make_model(case.kind, case.dtype, vocab_size=case.vocabulary)
    if model.config.to_dict().get("num_experts_per_tok") and not case.is_grouped:
        model.set_experts_implementation("eager")  # The grouped kernel has no float64.
    return model


def _rounds(forests: list[Forest], plan: str) -> tuple[Round, ...]:
    """Every group once, in rounds of the plan's kind; see `_forests` for the groups."""
    match plan:
        case "own":
            teams = team_of(forests, (0, 1), (0, 3)), team_of(forests, (1, 2), (1, 2))
            return (Round(teams=teams),)
        case "alone":  # Rank 0 has nothing in the second round, and rank 1 two groups in blocks.
            teams = team_of(forests, (0, 1), (0,)), team_of(forests, (1, 2), (1,))
            blocks = team_of(forests, (1, 2), (2, 3), blocks=3, is_offloaded=True)
            return Round(teams=teams), Round(teams=(blocks,))
        case "recomputed":
            again = team_of(forests, (0, 1), (2,), recomputed_layers=1)
            return (Round(teams=(again, team_of(forests, (1, 2), (0, 1, 3)))),)
        case "together":
            rounds = team_of(forests, (0, 2), (0, 1, 3)), team_of(forests, (0, 2), (2,))
            return tuple(Round(teams=(team,)) for team in rounds)
        case _:
            rounds = (
                team_of(forests, (0, 2), (0, 2), blocks=3),
                team_of(forests, (0, 2), (1, 3), blocks=5, is_offloaded=True),
            )
            return tuple(Round(teams=(team,)) for team in rounds)


def _loss(case: Case) -> Loss:
    kind = "tests:reinforce" if case.loss == "user" else case.loss
    # Tight enough that some entries of these groups are limited, and some are not.
    return Loss(kind=kind, ratio_cap=1.5, mask_low=0.7, mask_high=1.5)


def _alone(case: Case) -> Seen:
    model, forests = _model(case), _forests(case)
    policy = prepare(model).policy
    microbatches = plan_step(forests, shape=policy.shape, budget_bytes=10**9, head_chunk=CHUNK)
    seen = forward_backward(
        policy,
        Objective(
            forests=forests,
            loss_weights=group_loss_weights(forests, loss=Loss(normalisation=case.normalisation)),
            loss=loss_function(_loss(case), user=reinforce),
        ),
        microbatches,
        head_chunk=CHUNK,
    )
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Seen(gradients, seen)


def _of_rank(ranks: Ranks, case: Case) -> Seen | None:
    model, forests = _model(case), _forests(case)
    policy = shard(prepare(model), ranks=ranks, dtype=case.dtype).policy
    own = forward_backward_rounds(
        policy,
        Objective(
            forests=forests,
            loss_weights=group_loss_weights(forests, loss=Loss(normalisation=case.normalisation)),
            loss=loss_function(_loss(case), user=reinforce),
        ),
        _rounds(forests, case.plan),
        peers=ranks,
        head_chunk=CHUNK,
    )
    everyones = ranks.gather_bytes(values_bytes(own))
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.to_local().numel() < parameter.numel(), name
        gradients[name] = parameter.grad.full_tensor()
    return Seen(gradients, merged([values_of(v) for v in everyones])) if everyones else None


def _worst(found: Gradients, expected: Gradients) -> float:
    """Largest ||difference|| / ||gradient|| over the parameters.

    A gradient that should be 0 is all rounding, so each norm counts as at least a thousandth of
    the largest.
    """
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(gradient.norm() for gradient in expected.values())
    return max(
        float((found[n] - expected[n]).norm() / torch.maximum(expected[n].norm(), floor))
        for n in expected
    )


PLANS = ("own", "alone", "recomputed", "together", "blocks")
LOSSES = ("cispo", "truncated_is", "ppo_clip", "gspo", "icepop", "user")
CASES = [
    *(Case(loss=loss, plan=plan) for loss in LOSSES for plan in PLANS),
    *(Case(plan=plan, normalisation="group") for plan in ("own", "blocks")),
    *(Case(kind, plan=plan) for kind in ("llama", "qwen2", "qwen3_moe") for plan in PLANS),
    *(Case(kind, plan="blocks") for kind in ("deepseek_v3", "gemma3_text", "gpt_oss")),
    *(Case(kind, plan="own") for kind in ("glm4_moe", "minimax_m2", "mistral")),
    *(Case("llama", plan=plan, vocabulary=63) for plan in ("own", "blocks")),
    *(Case("qwen3_moe", plan=plan, is_routed=True) for plan in PLANS),
    *(Case(dtype=torch.float32, plan=plan) for plan in PLANS),
    *(
        Case("qwen3_moe", torch.float32, plan=plan, is_routed=True, is_grouped=True)
        for plan in PLANS
    ),
]


def _name(case: Case) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    parts = [case.kind, dtype, case.plan, case.loss if case.loss != "cispo" else ""]
    parts += [case.normalisation if case.normalisation == "group" else ""]
    parts += ["routed" if case.is_routed else "", "grouped" if case.is_grouped else ""]
    parts += ["odd" if case.vocabulary % 2 else ""]
    return "-".join(filter(None, parts))


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_gradients_of_two_ranks_are_those_of_one(case: Case, rank_pair: RankPair) -> None:
    found, _ = rank_pair.run(_of_rank, case)
    expected = _alone(case)
    bound = 1e-12 if case.dtype == torch.float64 else 1e-5
    assert _worst(found.gradients, expected.gradients) <= bound
    # The loss is a mean of values of both signs, so its rounding is that of their sizes.
    rounding = bound * float(np.abs(expected.values.loss_E).mean())
    assert found.values.loss == pytest.approx(expected.values.loss, rel=bound, abs=rounding)
    for name in ("logprob_E", "loss_E", "entropy_E", "is_limited_E", "version_E"):
        ours, theirs = (np.sort(getattr(s.values, name)) for s in (found, expected))
        assert np.allclose(ours, theirs, rtol=100 * bound), name
    # Each group is counted once, on whichever rank it runs.
    disagreements = len(_forests(case)) if case.is_routed else 0
    assert found.values.route_disagreements == disagreements
    assert expected.values.route_disagreements == disagreements
    if case.loss != "user":
        assert 0 < expected.values.is_limited_E.mean() < 1


def _warnings(ranks: Ranks) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _of_rank(ranks, Case())
    return [str(each.message) for each in caught]


def test_ranks_compute_without_a_warning_in_the_trainers_log(rank_pair: RankPair) -> None:
    assert rank_pair.run(_warnings) == [[], []]
