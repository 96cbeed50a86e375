"""Keys and values that blocks of one forest hand on: the live path's in memory, the rest stored.

A block's queries see its own keys and those of the ancestors of its first token: the live path,
one key at each depth. So a layer's buffer has slots: the path by depth, then the block. Going
forward, the part of a block that lies on a later path moves to its depth; going backward it comes
back from a store, which holds only tokens on the path of some block. Gradients of keys and values
need no store: going backward, what later blocks owe lies on the path until the block that owns it
runs.

Example: a root R of 4 tokens with children A and B of 3 each, in blocks R, A, B. While A runs, the
slots hold R (0 to 3) and A (4 to 6); while B runs, they hold R and B. A's keys are on no later
path, so they are overwritten and never stored; R's are stored for the way back.

The live bytes follow from the longest path and the block, not from the forest. The store may lie
on another device or in a file: each of its keys is written once, and read when its block's path
becomes live. It is laid out by token, so what moves is contiguous in it: copies to and from a GPU
touch no other host memory.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShape:
    """Keys and values of a model: how many a token has, their dtype and device.

    Attributes:
        layers: M.
        heads: K.
        head_size: D.
        dtype: Of keys and values; their gradients are at least fp32.
        device: That computes with them.
        slot_multiple: The attention backend needs a multiple of so many slots.
    """

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    slot_multiple: int = 1


def empty_carries(slots: int, shape: KeyShape) -> tuple[Carry, ...]:
    """Carries of all layers with at least so many slots.

    They are zeros, not uninitialised: a kernel may read a slot that no query sees, and a NaN there
    times a probability of 0 is a NaN.
    """
    multiple = shape.slot_multiple
    size = (shape.heads, -(-slots // multiple) * multiple, shape.head_size)
    wide = torch.promote_types(shape.dtype, torch.float32)

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=shape.device)

    return tuple(
        Carry(
            key_KND=zeros(shape.dtype),
            value_KND=zeros(shape.dtype),
            key_grad_KND=zeros(wide),
            value_grad_KND=zeros(wide),
        )
        for _ in range(shape.layers)
    )


def path_of(forest: Forest, token: int) -> Integers:
    """Layout indices of a token's ancestors, the root first."""
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

    Chains that follow each other on the path become neighbours in the slots, so their rectangles
    join into one: fewer kernel calls.
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

    Call `enter` for every block in order, each followed by its forward; then `start_backward`; then
    `enter` for every block in reverse order, each followed by its forward and backward.
    """

    def __init__(
        self,
        forest: Forest,
        pieces: ForestPieces,
        blocks: Sequence[tuple[int, int]],
        *,
        shape: KeyShape,
        make_store: MakeStore | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            forest: The trees that run in blocks.
            pieces: The forest's, from `plan.pieces`.
            blocks: (start, end) over the forest's layout, in order.
            shape: What one token's keys and values need.
            make_store: Allocates the store outside the memory budget; None keeps it on the device.
        """
        self._forest, self._pieces, self._device = forest, pieces, shape.device
        self._blocks = [_Block(start, end, path_of(forest, start)) for start, end in blocks]
        self._stored = np.unique(np.concatenate([block.path for block in self._blocks]))
        slots = max(len(block.path) + block.end - block.start for block in self._blocks)
        self._carries = empty_carries(slots, shape)
        store_size = (shape.layers, 2, len(self._stored), shape.heads, shape.head_size)
        self._store_MPUKD = (
            torch.empty(store_size, dtype=shape.dtype, device=shape.device)
            if make_store is None
            else make_store(store_size, shape.dtype)
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

    def start_backward(self) -> None:
        """Expect the blocks in reverse order from here on."""
        self._is_backward = True
        self._current = None

    def _enter_forward(self, number: int) -> None:
        if self._current is None:
            return
        before, block = self._blocks[self._current], self._blocks[number]
        # Of the block that just ran, what lies on any path goes to the store, and what lies on the
        # next block's path also moves to the slots of its depth. The rest is overwritten.
        is_own = (self._stored >= before.start) & (self._stored < before.end)
        put_away = np.flatnonzero(is_own)
        kept = int(np.searchsorted(block.path, before.start))
        shift = len(before.path) - before.start
        away_from = self._index(self._stored[put_away] + shift)
        path_from = self._index(block.path[kept:] + shift)
        for layer, carry in enumerate(self._carries):
            for both, buffer in enumerate((carry.key_KND, carry.value_KND)):
                if len(put_away):
                    store_UKD = self._store_MPUKD[layer, both]
                    away_UKD = buffer[:, away_from].transpose(0, 1)
                    # A block's tokens are contiguous in the layout, hence in the store too.
                    store_UKD[int(put_away[0]) : int(put_away[-1]) + 1].copy_(away_UKD)
                buffer[:, kept : len(block.path)] = buffer[:, path_from]

    def _enter_backward(self, number: int) -> None:
        if self._current is None:
            return
        later, block = self._blocks[self._current], self._blocks[number]
        # The paths agree below `shared`; from there on the later one runs through this block.
        shared = int(np.searchsorted(later.path, block.start))
        ranges = _ranges(np.searchsorted(self._stored, block.path[shared:]), slot=shared)
        own = self._index(later.path[shared:] - block.start + len(block.path))
        used = max(len(later.path), len(block.path) + block.end - block.start)
        for layer, carry in enumerate(self._carries):
            for both, buffer in enumerate((carry.key_KND, carry.value_KND)):
                for start, end, slot in ranges:
                    stored_UKD = self._store_MPUKD[layer, both, start:end]
                    buffer[:, slot : slot + end - start].transpose(0, 1).copy_(stored_UKD)
            # Gradients that later blocks left on the path belong to this block's own tokens: they
            # move to its slots, and its path starts from zero. Those below `shared` stay.
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
            position_S=self._forest.position_N[seen],
        )

    def _index(self, array: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _ranges(stored: Integers, *, slot: int) -> list[tuple[int, int, int]]:
    """(start, end, slot of the start) of every run of consecutive store indices, by slot."""
    cuts = [0, *(np.flatnonzero(np.diff(stored) != 1) + 1).tolist(), len(stored)]
    return [
        (int(stored[first]), int(stored[last - 1]) + 1, slot + first)
        for first, last in itertools.pairwise(cuts)
        if last > first
    ]


class WholeKeys:
    """The carries of a forest in blocks with the keys of all its tokens in them, in layout order.

    For ranks that run one forest together and copy their keys into each other's carries.
    """

    def __init__(
        self,
        forest: Forest,
        pieces: ForestPieces,
        blocks: Sequence[tuple[int, int]],
        *,
        shape: KeyShape,
    ) -> None:
        """Allocate the buffers; arguments as of `PathKeys`."""
        self._forest, self._pieces, self._blocks = forest, pieces, blocks
        self._carries = empty_carries(forest.token_count, shape)

    def enter(self, number: int) -> BlockKeys:
        """The keys of this block's attention; all are live already."""
        start, end = self._blocks[number]
        return BlockKeys(
            plan=attention_plan(self._pieces, start=start, end=end),
            carries=self._carries,
            subtree_end_S=self._forest.subtree_end_N[:end],
            position_S=self._forest.position_N[:end],
        )

    def start_backward(self) -> None:
        """Do nothing: all keys stay where they are."""


class CarriedKeys(Protocol):
    """Gives each block's attention its keys: all blocks in order, then all in reverse order."""

    def enter(self, number: int) -> BlockKeys:
        """Make this block's keys live; it runs next."""
        ...

    def start_backward(self) -> None:
        """Expect the blocks in reverse order from here on."""
        ...
