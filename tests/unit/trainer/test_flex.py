"""The GPU path as far as a CPU can run it: its block mask, its padding and its carry."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from forgemq.contracts.run import Loss
from forgemq.trainer.core.flex import BLOCK, BUCKET, block_mask
from forgemq.trainer.core.loss import loss_function
from forgemq.trainer.core.memory import Microbatch
from forgemq.trainer.core.plan import AttentionPlan
from forgemq.trainer.core.step import forward_backward
from forgemq.trainer.core.tree import Forest, Integers, joined, read_tree
from forgemq.trainer.model import prepared
from tests.unit.trainer.scene import adversarial_samples, agent_samples, make_model, merge


def _groups(prompt: int) -> list[Forest]:
    generator = np.random.default_rng(prompt)
    samples = agent_samples(generator, rollouts=3, turns=3, prompt=prompt, act=40, observe=60)
    return [
        read_tree(merge(samples, "g-0")),
        read_tree(merge(adversarial_samples(generator), "g-1")),
    ]


@pytest.mark.parametrize("start_share", [0.0, 0.3, 0.9])
def test_the_block_mask_visits_what_is_visible_and_full_blocks_are_full(
    start_share: float,
) -> None:
    forest = joined(_groups(200))
    start = int(start_share * forest.token_count)
    queries = forest.token_count - start
    end = torch.zeros(BUCKET, dtype=torch.int32)
    end[: forest.token_count] = torch.from_numpy(forest.subtree_end_N)
    mask = block_mask(end, start=start, queries=BUCKET, query_count=queries)
    place = torch.arange(start, start + BUCKET)[:, None]
    key = torch.arange(BUCKET)[None]
    visible = (key <= place) & (place < end[None])
    tiles = visible.view(BUCKET // BLOCK, BLOCK, BUCKET // BLOCK, BLOCK).transpose(1, 2)
    blocks = BUCKET // BLOCK
    seen, full = torch.zeros(2, blocks, blocks, dtype=torch.bool)
    for row in range(blocks):
        partial = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]]
        whole = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]]
        seen[row, partial] = True
        seen[row, whole] = full[row, whole] = True
    assert not (tiles.flatten(2).any(2) & ~seen).any()
    assert tiles.flatten(2).all(2)[full].all()
    if start == 0:
        expected = create_block_mask(
            lambda _b, _h, q, k: (k <= q) & (q < end[k]), None, None, BUCKET, BUCKET, device="cpu"
        )
        assert torch.equal(mask.to_dense() > 0, expected.to_dense() > 0)


def _dense_attention(
    subtree_end: Integers, plan: AttentionPlan, /, *, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """In flex attention's place: a dense mask, which a CPU can run backward."""
    end = torch.from_numpy(subtree_end[: plan.end]).to(device)
    place = torch.arange(plan.start, plan.end)[:, None]
    key = torch.arange(plan.end)[None]
    mask = (key <= place) & (place < end[None])

    def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )

    return attend


@pytest.mark.parametrize("block", [None, 50])
def test_carried_keys_give_the_same_gradients_as_the_pieces(block: int | None) -> None:
    groups = _groups(20)
    count = sum(forest.token_count for forest in groups)
    size = count if block is None else block
    blocks = tuple((start, min(start + size, count)) for start in range(0, count, size))
    loaded = prepared(make_model("qwen3", torch.float64))
    gradients = []
    for policy in (loaded.policy, replace(loaded.policy, flex=_dense_attention)):
        forward_backward(
            policy,
            groups,
            [Microbatch(groups=(0, 1), blocks=blocks)],
            weights=[1.0, 1.0],
            loss=loss_function(Loss()),
            head_chunk=64,
        )
        gradients.append({n: p.grad.clone() for n, p in loaded.model.named_parameters()})
        loaded.model.zero_grad()
    for name, left in gradients[0].items():
        assert float((left - gradients[1][name]).norm() / left.norm()) < 1e-12
