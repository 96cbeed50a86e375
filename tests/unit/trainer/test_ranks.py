"""Two ranks train as one: the same gradients, norms and weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forgemq.contracts.run import Loss
from forgemq.trainer.core.assignment import SharedRound, plan_rounds
from forgemq.trainer.core.loss import loss_function
from forgemq.trainer.core.memory import plan_step
from forgemq.trainer.core.rounds import forward_backward_rounds
from forgemq.trainer.core.step import forward_backward, group_weights
from forgemq.trainer.core.tree import Forest, read_tree
from forgemq.trainer.model import prepared
from forgemq.trainer.ranks import Ranks
from forgemq.trainer.sharding import sharded
from tests.unit.trainer.rank_scene import WORLD, on_ranks
from tests.unit.trainer.scene import adversarial_samples, agent_samples, make_model, merge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHUNK = 8


def _forests() -> list[Forest]:
    generator = np.random.default_rng(3)
    groups = [
        agent_samples(generator),
        adversarial_samples(generator),
        agent_samples(generator, rollouts=6, turns=4, is_stripped=True),
    ]
    return [read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(groups)]


def _model(kind: str, dtype: torch.dtype) -> nn.Module:
    model = make_model(kind, dtype)
    if kind == "qwen3_moe":
        model.set_experts_implementation("eager")
    return model


def _budget(model: nn.Module, tokens: int, whole: int) -> int:
    """Bytes in which `tokens` tokens run at once, with carries for a tree of `whole`."""
    shape = prepared(model).policy.shape
    block = shape.block_bytes(tokens, chunk=CHUNK, is_carried=whole > 0)
    return block + whole * shape.carry_bytes_per_token


def _alone(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    policy, forests = prepared(model).policy, _forests()
    (microbatches,) = plan_step(
        forests, shape=policy.shape, world_size=1, budget_bytes=10**9, head_chunk=CHUNK
    )
    forward_backward(
        policy,
        forests,
        microbatches,
        weights=group_weights(forests, normalisation="step"),
        loss=loss_function(Loss(kind=kind)),
        head_chunk=CHUNK,
    )
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CASES = {
    "qwen3-fp64": ("qwen3", torch.float64, "cispo", 1e-12),
    "llama-untied-fp64": ("llama", torch.float64, "gspo", 1e-12),
    "moe-fp64": ("qwen3_moe", torch.float64, "cispo", 1e-12),
    "qwen3-fp32": ("qwen3", torch.float32, "cispo", 1e-5),
}


def _gradients_of_ranks(ranks: Ranks, folder: Path) -> None:
    for case, (kind, dtype, loss, _) in CASES.items():
        for plan in ("own", "shared"):
            model = _model(kind, dtype)
            forests = _forests()
            largest = max(forest.token_count for forest in forests)
            budget = 10**9 if plan == "own" else _budget(model, 70, largest)
            policy = sharded(prepared(model), ranks=ranks, dtype=dtype).policy
            rounds = plan_rounds(
                forests,
                shape=policy.shape,
                world_size=WORLD,
                budget_bytes=budget,
                head_chunk=CHUNK,
            )
            assert any(isinstance(r, SharedRound) for r in rounds) == (plan == "shared")
            seen = forward_backward_rounds(
                policy,
                forests,
                rounds,
                peers=ranks,
                weights=group_weights(forests, normalisation="step"),
                loss=loss_function(Loss(kind=loss)),
                head_chunk=CHUNK,
            )
            counts = ranks.total(torch.tensor([len(seen.logprob_E)]))
            assert int(counts) == sum(forest.entry_count for forest in forests)
            gradients = {}
            for name, parameter in model.named_parameters():
                assert isinstance(parameter.grad, DTensor), name
                assert parameter.to_local().numel() < parameter.numel()
                gradients[name] = parameter.grad.full_tensor()
            if ranks.rank == 0:
                torch.save(gradients, folder / f"{case}-{plan}.pt")


def test_gradients_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    on_ranks(_gradients_of_ranks, tmp_path)
    for case, (kind, dtype, loss, bound) in CASES.items():
        expected = _alone(_model(kind, dtype), loss)
        for plan in ("own", "shared"):
            found = torch.load(tmp_path / f"{case}-{plan}.pt")
            assert found.keys() == expected.keys()
            worst = max(
                float((found[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-12))
                for n in expected
            )
            assert worst <= bound, (case, plan)
