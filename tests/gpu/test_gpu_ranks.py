"""Ranks on GPUs, one a GPU, joined by NCCL: their gradients are those of one CPU.

One GPU is one rank: its shards are whole, but the process groups, the gathers and the sums are
NCCL's, and the parameters move to the GPU as on several ranks.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.assignment import plan_rounds
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.memory import BLOCK_TOKENS_MIN, ModelShape
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.rounds import forward_backward_rounds
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import shard
from tests.unit.trainer.rank_scene import RankProcesses
from tests.unit.trainer.scene import agent_samples, make_model, merge, routed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CHUNK = 64
HEAD_SIZE = 64
HIDDEN = 512
"""So wide that a recomputed layer keeps more than keys, values and their gradients take."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}
"""Relative to the norm of a parameter's gradient."""


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[RankProcesses]:
    """A rank for each GPU, for all tests of this file."""
    ranks = RankProcesses(
        world=torch.cuda.device_count(), device="cuda", deadline_s=120.0, work_deadline_s=300.0
    )
    yield ranks
    ranks.close()


def _forests(*, has_experts: bool) -> list[Forest]:
    generator = np.random.default_rng(5)
    sizes = [{"rollouts": 4, "turns": 4, "prompt": 200}, {"rollouts": 3}, {"rollouts": 2}]
    trees = [merge(agent_samples(generator, **size), f"g-{n}") for n, size in enumerate(sizes)]
    if has_experts:
        trees = [routed(tree, layers=2, top_k=2, experts=4) for tree in trees]
    return [read_tree(tree) for tree in trees]


def _objective(forests: list[Forest]) -> Objective:
    return Objective(
        forests=forests,
        loss_weights=group_loss_weights(forests, loss=Loss()),
        loss=loss_function(Loss()),
    )


def _budget_bytes(shape: ModelShape, forests: list[Forest], *, is_shared: bool) -> int:
    """Room for all groups, or for blocks of the largest one."""
    if not is_shared:
        return 10**9
    carries = shape.carry_bytes(max(forest.token_count for forest in forests))
    return carries + shape.block_bytes(BLOCK_TOKENS_MIN, chunk=CHUNK, is_carried=True)


def _of_rank(ranks: Ranks, kind: str, dtype: str, is_shared: bool) -> dict[str, Tensor]:
    forests = _forests(has_experts=kind == "qwen3_moe")
    model = make_model(
        kind, torch.float32, head_dim=HEAD_SIZE, hidden_size=HIDDEN, initializer_range=0.03
    )
    policy = shard(prepare(model, device=ranks.device), ranks=ranks, dtype=DTYPES[dtype]).policy
    rounds = plan_rounds(
        forests,
        shape=policy.shape,
        world_size=ranks.world_size,
        budget_bytes=_budget_bytes(policy.shape, forests, is_shared=is_shared),
        head_chunk=CHUNK,
    )
    assert any(planned.block_count > 1 for planned in rounds) == is_shared
    forward_backward_rounds(policy, _objective(forests), rounds, peers=ranks, head_chunk=CHUNK)
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.device.type == "cuda", name
        gradients[name] = parameter.grad.full_tensor().cpu()  # type: ignore[attr-defined]  # DTensor
    return gradients


def _of_one_cpu(kind: str) -> dict[str, Tensor]:
    forests = _forests(has_experts=kind == "qwen3_moe")
    model = make_model(
        kind, torch.float32, head_dim=HEAD_SIZE, hidden_size=HIDDEN, initializer_range=0.03
    )
    policy = prepare(model).policy
    microbatches = plan_step(forests, shape=policy.shape, budget_bytes=10**9, head_chunk=CHUNK)
    forward_backward(policy, _objective(forests), microbatches, head_chunk=CHUNK)
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_ranks_on_gpus_have_the_gradients_of_one_cpu(
    gpu_ranks: RankProcesses, kind: str, dtype: str, *, is_shared: bool
) -> None:
    found, *_ = gpu_ranks.run(_of_rank, kind, dtype, is_shared)
    expected = _of_one_cpu(kind)
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(gradient.norm()) for gradient in expected.values())
    for name, wanted in expected.items():
        difference = float((found[name] - wanted).norm())
        assert difference <= ROUNDING[dtype] * max(float(wanted.norm()), floor), name
