"""Tree attention on a GPU for trees with many branches: compiled FlexAttention over a block mask.

The mask of a tree is one integer for each key: key <= query < subtree_end[key]. Which blocks of
128 are empty, partial or full follows from the least and the largest end in each key block, so
nothing of size N x N exists: the mask is O(N), the lists of blocks are N/128 x N/128.

Queries and keys are padded to whole blocks, and their numbers of blocks are symbols to the
compiler: a model's attention is compiled once with gradient and once without, for trees of every
length, whole or in blocks. A layer with a window has a mask of its own, from one further integer
for each key and each query: their positions. That is a second kernel.

Shapes: T queries of this run, H query heads, S slots of keys, K key/value heads, D head size, A
blocks of queries, B blocks of keys.

What was checked without a GPU: docs/tree_training.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from forgemq_trainer.core.attention.attention import (
    BlockKeys,
    Carry,
    KeptOutput,
    RunAttention,
    write_into_carry,
)

BLOCK = 128
"""Tokens of FlexAttention's tile. Segments are not aligned to it: the padding would cost more than
the partial blocks do."""

BLOCKS_MIN = 2
"""torch.compile treats a size of 1 as a constant, and would compile again for it."""

KINDS_MAX = 8
"""Kernels that one model may compile. It needs two, with and without gradient, and two more if some
of its layers have a window; more than a few would mean that some length is no symbol, and that
every tree compiles again."""

MaskTensors: TypeAlias = tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]
"""The fields of a `TreeMask`, as the compiler traces them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMask:
    """Which keys a query sees: query t, at slot = start + t, sees key <= slot < end[key].

    Attributes:
        end_BS: int32, subtree end of each key by block; 0 for keys that no query sees.
        start: int32 scalar, slot of the first query.
        lists: Of blocks, as in BlockMask: for each block of queries the number of its partial
            blocks of keys, int32 [1, 1, A], and their indices, [1, 1, A, B]; the same for full
            blocks; then both for each block of keys.
        near: Under a window, int32 positions of queries and of keys by block, and the window.
    """

    end_BS: Tensor
    start: Tensor
    lists: tuple[Tensor, ...]
    near: tuple[Tensor, ...] = ()

    def block_mask(self) -> BlockMask:
        """The mask in FlexAttention's form."""
        return _block_mask(self.end_BS, self.start, self.lists, self.near)


class FlexKernel(Protocol):
    """Attention under a mask."""

    def __call__(
        self,
        query_HTD: Tensor,
        key_KSD: Tensor,
        value_KSD: Tensor,
        /,
        *,
        mask: TreeMask,
        scale: float,
        has_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """[H, T, D], and if asked for the log-sum-exp [H, T]; T and S are whole blocks."""
        ...


def flex_attention_of(keys: BlockKeys, *, kernel: FlexKernel, device: torch.device) -> RunAttention:
    """Attention of one run of queries under a block mask.

    Args:
        keys: The run's plan and carries; carries have whole blocks of slots.
        kernel: Runs attention under a mask on this device.
        device: Of queries and keys.
    """
    plan = keys.plan
    queries = plan.end - plan.start
    slots = keys.carries[0].key_KND.shape[1] if keys.carries else _padded(queries)
    # Slots of padding, and those that an earlier block left behind, end at 0: no query sees them.
    end_S = torch.zeros(slots, dtype=torch.int32)
    end_S[: plan.end] = torch.from_numpy(keys.subtree_end_S[: plan.end])
    position_S = torch.zeros(slots, dtype=torch.int32)
    position_S[: plan.end] = torch.from_numpy(keys.position_S[: plan.end])

    @cache
    def mask_under(window: int | None) -> TreeMask:
        near = None if window is None else Nearness(position_S=position_S.to(device), window=window)
        return tree_mask(end_S.to(device), start=plan.start, queries=queries, near=near)

    def attend(
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        /,
        *,
        scale: float,
        carry: Carry | None,
        kept: KeptOutput | None = None,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        # FlexAttention takes no output from elsewhere: a layer that runs again attends again.
        del kept
        key_KSD, value_KSD = _seen(key_TKD, value_TKD, carry, start=plan.start)
        query_HTD = _in_blocks(query_THD.transpose(0, 1))
        padded_HTD, lse_HT = kernel(
            query_HTD,
            key_KSD,
            value_KSD,
            mask=mask_under(window),
            scale=scale,
            has_lse=sinks_H is not None,
        )
        output_HTD = padded_HTD[:, :queries]
        if sinks_H is not None and lse_HT is not None:
            # The share of the softmax that the sink leaves to the keys.
            share_HT = torch.sigmoid(lse_HT[:, :queries] - sinks_H[:, None])
            output_HTD = (output_HTD * share_HT[..., None]).to(query_THD.dtype)
        return output_HTD.transpose(0, 1)

    return attend


def _seen(
    key_TKD: Tensor, value_TKD: Tensor, carry: Carry | None, *, start: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of all slots, in whole blocks: the run's own, and those of its carry."""
    key_KTD, value_KTD = key_TKD.transpose(0, 1), value_TKD.transpose(0, 1)
    if carry is None:
        return _in_blocks(key_KTD), _in_blocks(value_KTD)
    return (
        write_into_carry(key_KTD, carry.key_KND, carry.key_grad_KND, start=start),
        write_into_carry(value_KTD, carry.value_KND, carry.value_grad_KND, start=start),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearness:
    """What a window depends on: int32 position of each slot, and how many keys a query sees."""

    position_S: Tensor
    window: int


def tree_mask(end_S: Tensor, *, start: int, queries: int, near: Nearness | None = None) -> TreeMask:
    """The mask of `key <= start + query < end[key]`, in O(N) and the lists of blocks.

    Args:
        end_S: int32, subtree end of each key, 0 for padding; as many as a multiple of BLOCK.
        start: Slot of the first query.
        queries: Number of queries; the padding of the last block sees no key.
        near: Of a layer with a window; None if queries see all ancestors.
    """
    device = end_S.device
    end_BS = end_S.clamp(max=start + queries).view(-1, BLOCK)
    largest_B, least_B = end_BS.amax(1), end_BS.amin(1)
    key_start_B = torch.arange(len(end_BS), device=device) * BLOCK
    query_start_A = torch.arange(start, start + _padded(queries), BLOCK, device=device)[:, None]
    query_last_A = query_start_A + BLOCK - 1
    is_seen_AB = (key_start_B <= query_last_A) & (query_start_A < largest_B)
    is_full_AB = (key_start_B + BLOCK - 1 <= query_start_A) & (query_last_A < least_B)
    positions: tuple[Tensor, ...] = ()
    if near is not None:
        key_BS = near.position_S.view(-1, BLOCK)
        query_AT = functional.pad(
            near.position_S[start : start + queries], (0, _padded(queries) - queries)
        ).view(-1, BLOCK)
        # By the nearest and by the furthest pair of two blocks; positions of padding are 0, which
        # may only visit a block for nothing.
        is_seen_AB &= query_AT.amin(1)[:, None] - key_BS.amax(1) < near.window
        is_full_AB &= query_AT.amax(1)[:, None] - key_BS.amin(1) < near.window
        window = torch.tensor(near.window, device=device, dtype=torch.int32)
        positions = (query_AT, key_BS, window)
    is_partial_AB = is_seen_AB & ~is_full_AB
    lists = [
        _listed(is_visited)
        for is_visited in (is_partial_AB, is_full_AB, is_partial_AB.t(), is_full_AB.t())
    ]
    return TreeMask(
        end_BS=end_BS,
        start=torch.tensor(start, device=device, dtype=torch.int32),
        lists=tuple(tensor for pair in lists for tensor in pair),
        near=positions,
    )


class CompiledFlex:
    """FlexAttention, compiled at its first call; a `FlexKernel`."""

    def __init__(
        self, backend: Callable[..., Any] | str = "inductor", *, kinds_max: int = KINDS_MAX
    ) -> None:
        """Compile nothing yet.

        Args:
            backend: Of `torch.compile`.
            kinds_max: A call that would need a further kernel beyond these raises an error.
        """
        # fullgraph makes it an error. Otherwise torch would silently run FlexAttention uncompiled,
        # with scores of size N x N.
        self._attend = torch.compile(  # type: ignore[call-overload]  # torch's stubs lack two names
            _attend,
            fullgraph=True,
            dynamic=False,
            recompile_limit=kinds_max,
            isolate_recompiles=True,
            backend=backend,
        )

    def __call__(
        self,
        query_HTD: Tensor,
        key_KSD: Tensor,
        value_KSD: Tensor,
        /,
        *,
        mask: TreeMask,
        scale: float,
        has_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention under a mask, by the compiled kernel."""
        lists = tuple(_mark_dynamic(tensor, *range(2, tensor.dim())) for tensor in mask.lists)
        near = tuple(_mark_dynamic(each, 0) if each.dim() else each for each in mask.near)
        output, lse = self._attend(
            _mark_dynamic(_by_block(query_HTD), 2),
            _mark_dynamic(_by_block(key_KSD), 2),
            _mark_dynamic(_by_block(value_KSD), 2),
            (_mark_dynamic(mask.end_BS, 0), mask.start, lists, near),
            scale,
            has_lse,
        )
        return output[0], None if lse is None else lse[0]


def _mark_dynamic(tensor: Tensor, *dimensions: int) -> Tensor:
    """Mark sizes of the tensor as symbols for the compiler; returns the tensor."""
    torch._dynamo.mark_dynamic(tensor, dimensions)
    return tensor


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskTensors,
    scale: float,
    has_lse: bool,  # the compiled function is called by position
) -> tuple[Tensor, Tensor | None]:
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "torch.compile is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE): tree "
            "attention on a GPU would hold scores of every pair of tokens"
        )
    # Lengths written as 128 * blocks: the compiler sees that tiles divide them, and need not mask
    # loads at the end.
    query, key, value = query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)
    masked: dict[str, Any] = {
        "block_mask": _block_mask(*mask),
        "scale": scale,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if has_lse:
        output, others = flex_attention(
            query, key, value, return_aux=AuxRequest(lse=True), **masked
        )
        return output, others.lse
    output = flex_attention(query, key, value, **masked)
    assert isinstance(output, Tensor)
    return output, None


def _block_mask(
    end_BS: Tensor, start: Tensor, lists: tuple[Tensor, ...], near: tuple[Tensor, ...]
) -> BlockMask:
    end_S = end_BS.flatten()

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        slot = query + start
        return (key <= slot) & (slot < end_S[key])

    def visible_and_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query_AT, key_BS, window = near
        distance = query_AT.flatten()[query] - key_BS.flatten()[key]
        return visible(batch, head, query, key) & (distance < window)

    keys, key_order, full_keys, full_key_order, *of_keys = lists
    queries, query_order, full_queries, full_query_order = of_keys
    return BlockMask(
        (keys.shape[-1] * BLOCK, len(end_S)),
        keys,
        key_order,
        full_keys,
        full_key_order,
        queries,
        query_order,
        full_queries,
        full_query_order,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible_and_near if near else visible,
    )


def _by_block(values_HTD: Tensor) -> Tensor:
    heads, count, size = values_HTD.shape
    return values_HTD[None].view(1, heads, count // BLOCK, BLOCK, size)


def _listed(is_visited: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the number of its visited columns, and their indices in order, then zeros."""
    order = torch.zeros(is_visited.shape, dtype=torch.int32, device=is_visited.device)
    rows, columns = is_visited.nonzero(as_tuple=True)
    rank = is_visited.cumsum(1, dtype=torch.int32)[rows, columns] - 1
    order[rows, rank.long()] = columns.to(torch.int32)
    return is_visited.sum(1, dtype=torch.int32)[None, None], order[None, None]


def _padded(count: int) -> int:
    return max(BLOCKS_MIN, -(-count // BLOCK)) * BLOCK


def _in_blocks(values_HTD: Tensor) -> Tensor:
    count = values_HTD.shape[1]
    missing = _padded(count) - count
    # Contiguous, as the compiler would compile again for another memory layout.
    return functional.pad(values_HTD, (0, 0, 0, missing)) if missing else values_HTD.contiguous()
