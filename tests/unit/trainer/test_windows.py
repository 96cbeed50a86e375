"""Windows and sinks: attention of every query by its definition, from a dense mask in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from forgemq_trainer.core.attention.attention import AttentionBackend, BlockKeys
from forgemq_trainer.core.attention.cpu_attention import CpuAttention
from forgemq_trainer.core.attention.flex import BLOCK, Nearness, tree_mask
from forgemq_trainer.core.attention.gpu_attention import GpuAttention
from forgemq_trainer.core.attention.plan import attention_plan, pieces
from forgemq_trainer.core.tree import Forest, joined, read_tree
from tests.unit.trainer.gpu_kernels import PieceByPiece, eager_flex
from tests.unit.trainer.scene import adversarial_samples, agent_samples, merge

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def _forest() -> Forest:
    generator = np.random.default_rng(0)
    long = agent_samples(generator, rollouts=3, turns=4, prompt=150, act=20, observe=60)
    return joined(
        [read_tree(merge(long, "g-0")), read_tree(merge(adversarial_samples(generator), "g-1"))]
    )


def _dense(
    tensors: list[Tensor], forest: Forest, *, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Softmax over the visible scores and the sink, whose value is 0."""
    query, key, value = (tensor.transpose(0, 1) for tensor in tensors)
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, 0) for each in (key, value))
    token = torch.arange(forest.token_count)
    position = torch.from_numpy(forest.position_N)
    end = torch.from_numpy(forest.subtree_end_N)
    visible = (token <= token[:, None]) & (token[:, None] < end)
    if window is not None:
        visible &= position[:, None] - position < window
    scores = (0.3 * query @ key.transpose(1, 2)).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        of_all = sinks[:, None, None].expand(-1, len(token), 1)
        scores = torch.cat([scores, of_all], dim=-1)
    return (scores.softmax(-1)[..., : len(token)] @ value).transpose(0, 1)


BACKENDS: dict[str, AttentionBackend] = {
    "cpu": CpuAttention(),
    "flex": GpuAttention(head_size=SIZE, kind="flex", flex=eager_flex),
    "varlen": GpuAttention(head_size=SIZE, kind="varlen", flex=eager_flex, varlen=PieceByPiece()),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "window", "has_sinks"),
    [
        *(("cpu", window, False) for window in (1, 7, 100, 128, 200, 10_000)),
        ("cpu", None, True),
        ("cpu", 100, True),
        ("flex", 100, False),
        ("flex", 100, True),
        ("varlen", None, True),
        ("varlen", 100, True),
    ],
)
def test_output_and_gradients_are_those_of_the_definition(
    *, backend: str, window: int | None, has_sinks: bool
) -> None:
    forest = _forest()
    count = forest.token_count
    keys = BlockKeys(
        plan=attention_plan(pieces(forest), start=0, end=count),
        carries=(),
        subtree_end_S=forest.subtree_end_N,
        position_S=forest.position_N,
    )
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()

    tensors = [drawn(count, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    sinks = drawn(HEADS) if has_sinks else None
    inputs = [*tensors, *([sinks] if sinks is not None else [])]
    attend = BACKENDS[backend].of_run(keys, dtype=torch.float64, device=torch.device("cpu"))
    output = attend(*tensors, scale=0.3, carry=None, window=window, sinks_H=sinks)
    expected = _dense(tensors, forest, window=window, sinks=sinks)
    owed = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    assert (output - expected).norm() <= 1e-13 * expected.norm()
    found = torch.autograd.grad(output, inputs, owed)
    for left, right in zip(found, torch.autograd.grad(expected, inputs, owed), strict=True):
        assert (left - right).norm() <= 1e-13 * owed.norm()


@pytest.mark.parametrize("window", [100, 300])
def test_lists_under_a_window_name_every_visible_block_and_full_ones_are_full(window: int) -> None:
    """FlexAttention skips a block that is not listed, and masks nothing of a full one."""
    forest = _forest()
    count = forest.token_count
    start = count // 3
    padded = -(-count // BLOCK) * BLOCK
    end, position = torch.zeros(padded, dtype=torch.int32), torch.zeros(padded, dtype=torch.int32)
    end[:count] = torch.from_numpy(forest.subtree_end_N)
    position[:count] = torch.from_numpy(forest.position_N)
    near = Nearness(position_S=position, window=window)
    mask = tree_mask(end, start=start, queries=count - start, near=near)
    rows = mask.lists[0].shape[-1]
    place = torch.arange(start, start + rows * BLOCK)[:, None]
    key = torch.arange(padded)
    own = torch.nn.functional.pad(position[start:count], (0, rows * BLOCK - count + start))
    visible = (key <= place) & (place < end) & (own[:, None] - position < window)
    tiles = visible.view(rows, BLOCK, -1, BLOCK).transpose(1, 2).flatten(2)
    listed = []
    for counts, order in (mask.lists[:2], mask.lists[2:4]):
        dense = torch.zeros(order.shape[2:], dtype=torch.bool)
        for row in range(rows):
            dense[row, order[0, 0, row, : counts[0, 0, row]].long()] = True
        listed.append(dense)
    partial, full = listed
    assert tiles.all(2)[full].all()
    assert (partial | full)[tiles.any(2)].all()
    assert (partial | full).sum() < 1.5 * tiles.any(2).sum()
