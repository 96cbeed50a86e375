"""The CPU's kernels are exact for every head size and dtype, so no slower fallback exists."""

import math

import pytest
import torch
from torch import Tensor

from forgemq_trainer.core.attention.cpu_attention import AttentionRun, attend
from forgemq_trainer.core.attention.plan import AttentionPlan

TOKENS, FORK, LIGHT = 100, 40, 70
PLAN = AttentionPlan(
    start=0,
    end=TOKENS,
    triangles=((0, LIGHT), (LIGHT, TOKENS)),
    rectangles=((LIGHT, TOKENS, 0, FORK),),
)
"""A chain of 70 tokens, and a light subtree of 30 tokens that branches off after its 40th."""

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def _dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    place = torch.arange(TOKENS)
    is_seen = place[None] <= place[:, None]
    is_seen &= (place[:, None] < LIGHT) | (place[None] >= LIGHT) | (place[None] < FORK)
    scores = torch.einsum("ktqd,knd->kqtn", query, key) * scale
    share = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("kqtn,knd->ktqd", share, value)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [1, 3, 8, 17, 64, 80, 100, 128, 192, 257, 512])
def test_every_head_size_and_dtype_is_as_exact_as_its_precision(
    *, size: int, dtype: torch.dtype
) -> None:
    """Output and gradients against dense attention in float64 on the same rounded inputs."""
    generator = torch.Generator().manual_seed(size)
    shapes = [(2, TOKENS, 3, size), (2, TOKENS, size), (2, TOKENS, size)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    narrow = [tensor.clone().requires_grad_() for tensor in inputs]
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    scale = 1 / math.sqrt(size)
    found = attend(narrow[0], narrow[1], narrow[2], AttentionRun(plan=PLAN, scale=scale))
    expected = _dense(wide[0], wide[1], wide[2], scale)
    for output in (found, expected):
        output.double().square().sum().backward()
    pairs = [(found, expected)] + [(a.grad, b.grad) for a, b in zip(narrow, wide, strict=True)]
    for got, wanted in pairs:
        assert got is not None
        assert wanted is not None
        assert (got.double() - wanted).norm() <= BOUNDS[dtype] * wanted.norm()
