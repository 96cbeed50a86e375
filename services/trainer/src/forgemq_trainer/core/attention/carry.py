"""Keys and values that blocks of one forest hand on: of the live path only, the rest put away.

A block's queries see its own keys and those of the ancestors of its first token: the live path,
one key at each depth. So a layer's buffer has slots: the path by depth, then the block. Going
forward, the part of a block that lies on a later path moves to its depth; going backward it comes
back from a store, which holds nothing but tokens on the path of some block. Gradients of keys and
values need no store: going backward, what later blocks owe lies on the path until the block that
owns it runs.

The live bytes follow from the longest path and the block, not from the forest. The store may lie
on another device or in a file: each of its keys is written once and read when its block's path
comes up. It is laid out by token, so that what moves is contiguous there: to and from a GPU no
other host memory is touched.

M layers, K key/value heads, S slots, U stored tokens, D head size. The least budget is
`memory.least_budget_bytes`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from forgemq_trainer.core.attention.attention import BlockKeys, Carry
from forgemq_trainer.core.attention.plan import AttentionPlan, ForestPieces, attention_plan
from forgemq_trainer.core.tree import Forest, Integers

MakeStore: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""(size, dtype) -> a tensor outside the memory budget."""


def empty_carry(
    slots: int, *, key_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> Carry:
    """A layer's carry; zeros, for a kernel may read a slot that no query sees."""
    size = (key_heads, slots, head_size)
    wide = torch.promote_types(dtype, torch.float32)

    def zeros(of: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=of, device=device)

    return Carry(
        key_KND=zeros(dtype),
        value_KND=zeros(dtype),
        key_grad_KND=zeros(wide),
        value_grad_KND=zeros(wide),
    )


def path_of(forest: Forest, token: int) -> Integers:
    """Layout indices of a token's ancestors, by depth."""
    ranges = []
    above = int(forest.parent_N[token])
    while above >= 0:
        segment = int(np.searchsorted(forest.segment_start_M, above, side="right")) - 1
        start = int(forest.segment_start_M[segment])
        ranges.append(np.arange(start, above + 1))
        above = int(forest.parent_N[start])
    return np.concatenate(ranges[::-1]) if ranges else np.zeros(0, dtype=np.int64)


def slot_plan(plan: AttentionPlan, *, position_N: Integers, path_tokens: int) -> AttentionPlan:
    """The same pieces with keys by slot: ancestors at their depth, then the block's own.

    Chains that follow each other on the path become neighbours, so their rectangles join.
    """
    shift = path_tokens - plan.start

    def slot(key: int) -> int:
        return key + shift if key >= plan.start else int(position_N[key])

    rows = sorted((q0 + shift, q1 + shift, slot(k0), slot(k1 - 1) + 1) for q0, q1, k0, k1 in
                  plan.rectangles)  # fmt: skip
    rectangles: list[tuple[int, int, int, int]] = []
    for row in rows:
        last = rectangles[-1] if rectangles else None
        if last is not None and last[:2] == row[:2] and last[3] == row[2]:
            rectangles[-1] = (*last[:3], row[3])
        else:
            rectangles.append(row)
    return AttentionPlan(
        start=path_tokens,
        end=plan.end + shift,
        triangles=tuple((start + shift, end + shift) for start, end in plan.triangles),
        rectangles=tuple(rectangles),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    path: Integers


class PathKeys:
    """The carries of a forest in blocks, with only the live path's keys in them.

    Call `enter` for every block in order, each followed by its forward; then `turn`; then `enter`
    for every block in reverse order, each followed by its forward and backward.
    """

    def __init__(
        self,
        forest: Forest,
        pieces: ForestPieces,
        blocks: Sequence[tuple[int, int]],
        *,
        layers: int,
        key_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        slot_multiple: int = 1,
        make_store: MakeStore | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            forest: of the blocks.
            pieces: of the forest.
            blocks: (start, end) over its layout, in order.
            layers: M.
            key_heads: K.
            head_size: D.
            dtype: of keys and values; their gradients are at least fp32.
            device: of the computation.
            slot_multiple: what the number of slots must be divisible by.
            make_store: where the store goes; None keeps it on the device.
        """
        self._forest, self._pieces, self._device = forest, pieces, device
        self._blocks = [_Block(start, end, path_of(forest, start)) for start, end in blocks]
        self._stored = np.unique(np.concatenate([block.path for block in self._blocks]))
        slots = max(len(block.path) + block.end - block.start for block in self._blocks)
        self._carries = tuple(
            empty_carry(
                -(-slots // slot_multiple) * slot_multiple,
                key_heads=key_heads,
                head_size=head_size,
                dtype=dtype,
                device=device,
            )
            for _ in range(layers)
        )
        store_size = (layers, 2, len(self._stored), key_heads, head_size)
        self._store_MPUKD = (
            torch.empty(store_size, dtype=dtype, device=device)
            if make_store is None
            else make_store(store_size, dtype)
        )
        self._current: int | None = None
        self._is_backward = False

    def enter(self, number: int) -> BlockKeys:
        """Make the path of this block live."""
        if self._is_backward:
            self._enter_backward(number)
        else:
            self._enter_forward(number)
        self._current = number
        return self._keys(self._blocks[number])

    def turn(self) -> None:
        """The forward pass is done; blocks now come in reverse order."""
        self._is_backward = True
        self._current = None

    def _enter_forward(self, number: int) -> None:
        if self._current is None:
            return
        before, block = self._blocks[self._current], self._blocks[number]
        is_own = (self._stored >= before.start) & (self._stored < before.end)
        put_away = np.flatnonzero(is_own)
        kept = int(np.searchsorted(block.path, before.start))
        shift = len(before.path) - before.start
        away_from = self._index(self._stored[put_away] + shift)
        path_from = self._index(block.path[kept:] + shift)
        for layer, carry in enumerate(self._carries):
            for both, buffer in enumerate((carry.key_KND, carry.value_KND)):
                if len(put_away):
                    place_UKD = self._store_MPUKD[layer, both]
                    away_UKD = buffer[:, away_from].transpose(0, 1)
                    place_UKD[int(put_away[0]) : int(put_away[-1]) + 1].copy_(away_UKD)
                buffer[:, kept : len(block.path)] = buffer[:, path_from]

    def _enter_backward(self, number: int) -> None:
        if self._current is None:
            return
        later, block = self._blocks[self._current], self._blocks[number]
        shared = int(np.searchsorted(later.path, block.start))
        ranges = _ranges(np.searchsorted(self._stored, block.path[shared:]), slot=shared)
        own = self._index(later.path[shared:] - block.start + len(block.path))
        used = max(len(later.path), len(block.path) + block.end - block.start)
        for layer, carry in enumerate(self._carries):
            for both, buffer in enumerate((carry.key_KND, carry.value_KND)):
                for start, end, slot in ranges:
                    place_UKD = self._store_MPUKD[layer, both, start:end]
                    buffer[:, slot : slot + end - start].transpose(0, 1).copy_(place_UKD)
            for owed in (carry.key_grad_KND, carry.value_grad_KND):
                of_block = owed[:, shared : len(later.path)].clone()
                owed[:, shared:used] = 0
                owed[:, own] = of_block

    def _keys(self, block: _Block) -> BlockKeys:
        plan = attention_plan(self._pieces, start=block.start, end=block.end)
        shift = len(block.path) - block.start
        seen = np.concatenate([block.path, np.arange(block.start, block.end)])
        return BlockKeys(
            plan=slot_plan(plan, position_N=self._forest.position_N, path_tokens=len(block.path)),
            carries=self._carries,
            subtree_end_S=self._forest.subtree_end_N[seen] + shift,
        )

    def _index(self, array: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _ranges(stored: Integers, *, slot: int) -> list[tuple[int, int, int]]:
    """(start, end, slot of the start) of every run of consecutive places; the slots ascend."""
    cuts = [0, *(np.flatnonzero(np.diff(stored) != 1) + 1).tolist(), len(stored)]
    return [
        (int(stored[first]), int(stored[last - 1]) + 1, slot + first)
        for first, last in itertools.pairwise(cuts)
        if last > first
    ]


class WholeKeys:
    """The carries of a forest in blocks with the keys of all its tokens in them, in layout order.

    For ranks that run one forest together and bring their keys into each other's carries.
    """

    def __init__(
        self,
        forest: Forest,
        pieces: ForestPieces,
        blocks: Sequence[tuple[int, int]],
        *,
        carries: tuple[Carry, ...],
    ) -> None:
        """Arguments as of `PathKeys`; the carries have as many slots as the forest has tokens."""
        self._forest, self._pieces, self._blocks = forest, pieces, blocks
        self._carries = carries

    def enter(self, number: int) -> BlockKeys:
        """What the block's attention is told."""
        start, end = self._blocks[number]
        return BlockKeys(
            plan=attention_plan(self._pieces, start=start, end=end),
            carries=self._carries,
            subtree_end_S=self._forest.subtree_end_N[:end],
        )

    def turn(self) -> None:
        """Nothing: all keys stay where they are."""


class CarriedKeys(Protocol):
    """Hands out what each block's attention needs: all blocks in order, `turn`, all in reverse."""

    def enter(self, number: int) -> BlockKeys:
        """The block that runs next."""
        ...

    def turn(self) -> None:
        """Between the two passes."""
        ...
