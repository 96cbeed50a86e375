"""That a step with a draft head holds the predicted bytes, however its policy runs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_allocation import peak_allocated_bytes

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.drafting import Drafting
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.microbatches import path_microbatch, plan_step
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.draft_head import with_draft_head
from forgemq_trainer.model import prepare
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.scene import agent_samples, make_model, merge

CHUNK = 32


def _bush() -> Forest:
    generator = np.random.default_rng(0)
    samples = agent_samples(
        generator, rollouts=5, turns=4, prompt=60, act=20, observe=30, vocabulary=60
    )
    return read_tree(merge(samples, "g-5"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layers", "vocabulary", "depths", "way"),
    [
        (layers, vocabulary, depths, way)
        for layers, vocabulary, depths in ((4, 64, 1), (1, 64, 2), (1, 64, 3), (1, 2048, 2))
        for way in ("kept", "recomputed", "blocks")
        if layers > 1 or way != "recomputed"
    ],
)
@pytest.mark.slow
def test_a_step_with_a_head_holds_at_most_the_predicted_bytes(
    tmp_path: Path,
    layers: int,
    vocabulary: int,
    depths: int,
    way: str,
    dtype: torch.dtype,
) -> None:
    """With 4 layers the policy's peak is the larger one, with 1 the head's."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    sizes["vocab_size"] = vocabulary
    loaded = prepare(make_model("qwen3", dtype, num_hidden_layers=layers, **sizes))
    head, policy = with_draft_head(save_head(tmp_path, **sizes), loaded, top_k=16, depths=depths)
    forest = _bush()
    whole = policy.shape.block_bytes(forest.token_count, chunk=CHUNK, is_carried=False)
    budget = whole if way == "kept" else int(0.6 * whole)
    if way == "blocks":
        microbatch = path_microbatch(
            0, forest, shape=policy.shape, budget_bytes=budget, head_chunk=CHUNK
        )
    else:
        (microbatch,) = plan_step(
            [forest], shape=policy.shape, budget_bytes=budget, head_chunk=CHUNK
        )
    assert (microbatch.recomputed_layers > 0, len(microbatch.blocks) > 1) == (
        way == "recomputed",
        way == "blocks",
    )

    def run() -> None:
        forward_backward(
            policy,
            Objective(forests=[forest], loss_weights=[1.0], loss=loss_function(Loss())),
            [microbatch],
            head_chunk=CHUNK,
            drafting=Drafting(head.model, [forest], loss_weight=1.0),
        )

    run()  # Makes the parameters' gradients.
    peak = peak_allocated_bytes(run)
    if way == "blocks":  # States lie in files then, which torch counts too.
        peak -= min(depths, 3) * forest.token_count * 128 * dtype.itemsize
    assert 0.85 * microbatch.predicted_bytes <= peak <= 1.03 * microbatch.predicted_bytes
