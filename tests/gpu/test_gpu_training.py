"""A GPU's steps equal a CPU's, and each continues from the other's checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from forgemq_contracts import topics
from forgemq_contracts.steps import TrainingMetrics
from forgemq_trainer.training import Training
from tests.unit.trainer.rank_life import optimizer_tensors, save_checkpoint, store_of
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
    merge,
    routed,
    save_base,
    scheduled_step,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # torch reads `.grad` of every input while it compiles, and hides the warning from users.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

DEVICE = "cuda"
TOLERANCE = 2e-3
"""Relative, of losses and norms: sums in another order, after three steps at a rate of 1e-2."""


def _trained(training: Training, step: int, *, has_experts: bool) -> TrainingMetrics:
    tree = merge(agent_samples(np.random.default_rng(step), rollouts=24), f"g-{step}")
    if has_experts:
        tree = routed(tree, layers=2, top_k=2, experts=4)
    values = {tree.group_id: topics.encode(tree)}
    return training.train(training.read(scheduled_step(step, [tree]), values))


@pytest.mark.parametrize(
    "budget_bytes", [8_000_000_000, 2_880_000, 1_300_000], ids=["whole", "recomputed", "blocks"]
)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_a_gpu_trains_as_a_cpu_and_each_goes_on_from_its_checkpoint(
    tmp_path: Path, kind: str, budget_bytes: int
) -> None:
    base = save_base(tmp_path / "base", kind=kind, head_dim=16)
    configuration = configuration_of(base, memory_budget_bytes=budget_bytes)
    has_experts = kind == "qwen3_moe"
    on_gpu = Training(configuration, device=DEVICE, checkpoint=None)
    on_cpu = Training(configuration, device="cpu", checkpoint=None)
    seen = []
    for step in range(2):
        metrics = _trained(on_gpu, step, has_experts=has_experts)
        seen.append(metrics)
        expected = _trained(on_cpu, step, has_experts=has_experts)
        assert metrics.loss == pytest.approx(expected.loss, rel=TOLERANCE, abs=TOLERANCE)
        assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE)
    store = store_of(tmp_path, configuration)
    save_checkpoint(store, on_gpu, seen[-1])
    checkpoint = store.newest_checkpoint()
    assert checkpoint is not None
    wanted = optimizer_tensors(on_gpu)
    going_on = _trained(on_gpu, 2, has_experts=has_experts)
    for device in (DEVICE, "cpu"):
        restored = Training(configuration, device=device, checkpoint=checkpoint)
        state = optimizer_tensors(restored)
        assert state.keys() == wanted.keys()
        assert all(tensor.equal(wanted[name]) for name, tensor in state.items())
        again = _trained(restored, 2, has_experts=has_experts)
        assert again.grad_norm == pytest.approx(going_on.grad_norm, rel=TOLERANCE)
