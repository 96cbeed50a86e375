"""Tree attention on a GPU: compiled FlexAttention over a block mask that is built in O(blocks^2).

The mask of a tree is one integer for each key: key <= query < subtree_end[key]. Which blocks of
128 are empty, partial or full follows from the least and the largest end in each key block, so
nothing of size N x N exists. Lengths are padded to buckets: a few shapes, hence few compilations.

Design: prefix_tree.md, recommendations for GPUs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from forgemq.trainer.core.plan import AttentionPlan
from forgemq.trainer.core.tree import Integers

BLOCK = 128
"""FlexAttention's own tile; nodes are not aligned to it, which would cost more than it saves."""

BUCKET = 2048
"""Queries and keys are padded to multiples of this: at most a few per cent of a long tree."""


def flex_attention_of(
    subtree_end_K: Integers, plan: AttentionPlan, *, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """Attention of the queries [plan.start, plan.end) over all keys before plan.end.

    Returns:
        (query [1, heads, T, D], key and value [1, key heads, plan.end, D], scale) -> [1, heads,
        T, D].
    """
    queries, keys = plan.end - plan.start, plan.end
    query_size, key_size = _padded(queries), _padded(keys)
    end_K = torch.zeros(key_size, dtype=torch.int32, device=device)
    end_K[:keys] = torch.from_numpy(subtree_end_K[:keys]).to(device)
    # Keys of padding have end 0: nobody sees them; queries of padding lie beyond every end.
    mask = block_mask(end_K, start=plan.start, queries=query_size, query_count=queries)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        output = _compiled()(
            functional.pad(query, (0, 0, 0, query_size - queries)),
            functional.pad(key, (0, 0, 0, key_size - keys)),
            functional.pad(value, (0, 0, 0, key_size - keys)),
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(output, Tensor)
        return output[:, :, :queries]

    return attend


def block_mask(end_K: Tensor, *, start: int, queries: int, query_count: int) -> BlockMask:
    """The block mask of `key <= start + query < end[key]`.

    Args:
        end_K: subtree end of each key, 0 for padding; a multiple of BLOCK.
        start: layout index of the first query.
        queries: padded number of queries, a multiple of BLOCK.
        query_count: queries that are not padding.
    """
    device = end_K.device
    limit = start + query_count
    end_K = end_K.clamp(max=limit)
    end_BK = end_K.view(-1, BLOCK)
    largest_B, least_B = end_BK.amax(1), end_BK.amin(1)
    key_start_B = torch.arange(len(end_BK), device=device) * BLOCK
    query_start_Q = start + torch.arange(queries // BLOCK, device=device)[:, None] * BLOCK
    query_last_Q = query_start_Q + BLOCK - 1
    is_seen = (key_start_B <= query_last_Q) & (query_start_Q < largest_B)
    is_full = (key_start_B + BLOCK - 1 <= query_start_Q) & (query_last_Q < least_B)
    partial = _packed(is_seen & ~is_full)
    full = _packed(is_full)
    offset = torch.tensor(start, device=device, dtype=torch.int32)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query + offset
        return (key <= place) & (place < end_K[key])

    return BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(queries, len(end_K)),
    )


def _packed(is_visited: Tensor) -> tuple[Tensor, Tensor]:
    """Number of visited key blocks of each query block, and which, visited ones first."""
    counts = is_visited.sum(1, dtype=torch.int32)
    order = torch.argsort((~is_visited).to(torch.int8), dim=1, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]


def _padded(count: int) -> int:
    return -(-count // BUCKET) * BUCKET


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
