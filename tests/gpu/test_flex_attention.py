"""FlexAttention over the O(blocks) mask against the CPU's exact plan and a dense mask."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from forgemq.trainer.core.flex import BLOCK, block_mask, flex_attention_of
from forgemq.trainer.core.plan import attention_plan, pieces
from forgemq.trainer.core.tree import Forest, joined, read_tree
from tests.unit.trainer.scene import agent_samples, merge

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def _forest() -> Forest:
    generator = np.random.default_rng(0)
    return joined(
        [
            read_tree(
                merge(
                    agent_samples(generator, rollouts=4, turns=4, prompt=300, act=40, observe=70),
                    f"g-{n}",
                )
            )
            for n in range(2)
        ]
    )


def _dense(forest: Forest, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int):
    places = torch.arange(start, start + q.shape[2], device=q.device)
    keys = torch.arange(k.shape[2], device=q.device)
    end = torch.from_numpy(forest.subtree_end_N[: k.shape[2]]).to(q.device)
    mask = (keys[None] <= places[:, None]) & (places[:, None] < end[None])
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    )


@pytest.mark.parametrize("start_share", [0.0, 0.5])
def test_flex_equals_dense_forward_and_backward(start_share: float) -> None:
    forest = _forest()
    end = forest.token_count
    start = int(start_share * end)
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, count: int) -> torch.Tensor:
        values = torch.randn(1, heads, count, 64, device=device, generator=generator)
        return values.requires_grad_()

    q, k, v = draw(4, end - start), draw(2, end), draw(2, end)
    owed = torch.randn(q.shape, device=device, generator=generator)
    plan = attention_plan(pieces(forest), start=start, end=end)
    attend = flex_attention_of(forest, plan, device=device)
    ours = attend(q, k, v, 0.125)
    gradients = torch.autograd.grad(ours, (q, k, v), owed)
    expected = _dense(forest, q, k, v, start)
    wanted = torch.autograd.grad(expected, (q, k, v), owed)
    for left, right in zip((ours, *gradients), (expected, *wanted), strict=True):
        assert float((left - right).norm() / right.norm()) < 2e-3


def test_the_block_mask_is_that_of_its_definition() -> None:
    forest = _forest()
    count = forest.token_count // BLOCK * BLOCK
    end = torch.from_numpy(np.minimum(forest.subtree_end_N[:count], count)).int().cuda()
    ours = block_mask(end, start=0, queries=count, query_count=count)
    expected = create_block_mask(
        lambda _b, _h, q, k: (k <= q) & (q < end[k]), None, None, count, count, device="cuda"
    )
    assert torch.equal(ours.to_dense(), expected.to_dense())
