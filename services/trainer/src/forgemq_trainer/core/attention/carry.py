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

Ranks of a team run the blocks together. Each has slots for its own range of the block and that
range's path, stores own keys only, and trades the others with its peers (`path_trade`).

M layers, K key/value heads, S slots, U stored tokens, D head size. The least budget is
`memory.least_budget_bytes`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from forgemq_trainer.core.attention.attention import BlockKeys, Carry
from forgemq_trainer.core.attention.exchange import KeyExchange, KeyTrade, Peers
from forgemq_trainer.core.attention.path_trade import TeamPaths, Trade
from forgemq_trainer.core.attention.plan import (
    AttentionPlan,
    ForestPieces,
    Range,
    attention_plan,
)
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

    @property
    def shift(self) -> int:
        """From an own token to its slot."""
        return len(self.path) - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamBlocks:
    """How the ranks of a team run a layout together.

    Attributes:
        ranges: For each block, one range of queries for each rank, in order.
        peers: The ranks.
    """

    ranges: tuple[tuple[Range, ...], ...]
    peers: Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRun:
    """How this process runs a layout forward and backward.

    Attributes:
        blocks: Of the layout, in order; of a team, this rank's ranges of them.
        is_offloaded: True if keys and values off the live path go to a store.
        team: None if this process runs the layout alone.
    """

    blocks: Sequence[Range]
    is_offloaded: bool = False
    team: TeamBlocks | None = None

    @property
    def is_whole(self) -> bool:
        """True if it has no carries."""
        return self.team is None and len(self.blocks) == 1


class PathKeys:
    """The carries of a forest in blocks, with only the live path's keys in them.

    Call `enter` for every block in order, each followed by its forward; then `start_backward`; then
    `enter` for every block in reverse order, each followed by its forward and backward. Ranks of a
    team do so together: each has its own range of every block and that range's path.
    """

    def __init__(
        self,
        forest: Forest,
        pieces: ForestPieces,
        blocks: Sequence[Range],
        *,
        shape: KeyShape,
        make_store: MakeStore | None = None,
        team: TeamBlocks | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            forest: The trees that run in blocks.
            pieces: The forest's, from `plan.pieces`.
            blocks: (start, end) over the forest's layout, in order; of a team, this rank's ranges.
            shape: What one token's keys and values need.
            make_store: Allocates the store outside the memory budget; None keeps it on the device.
            team: None if this process runs the forest alone.
        """
        self._forest, self._pieces, self._shape = forest, pieces, shape
        self._peers = None if team is None else team.peers
        self._paths = TeamPaths(
            forest,
            [(block,) for block in blocks] if team is None else team.ranges,
            rank=0 if team is None else team.peers.rank,
        )
        self._count = len(blocks)
        self._stored = self._paths.stored()
        slots = max(int(forest.position_N[start]) + end - start for start, end in blocks)
        self._carries = empty_carries(slots, shape)
        store_size = (shape.layers, 2, len(self._stored), shape.heads, shape.head_size)
        self._store_MPUKD = (
            torch.empty(store_size, dtype=shape.dtype, device=shape.device)
            if make_store is None
            else make_store(store_size, shape.dtype)
        )
        self._current: tuple[int, _Block] | None = None
        self._is_backward = False

    def enter(self, number: int) -> BlockKeys:
        """Make the path of this block live."""
        start, end = self._paths.own(number)
        block = _Block(start, end, self._paths.path(number))
        if self._current is not None and self._is_backward:
            self._enter_backward(number, block, self._current[1])
        elif self._current is not None:
            self._enter_forward(number, block, self._current[1])
        self._current = number, block
        return self._keys(block)

    def exchange(self, number: int) -> KeyExchange | None:
        """How ranks hand over keys while this block, which was just entered, runs; None if none."""
        trade = None if self._peers is None else self._paths.within(number)
        if trade is None or trade.is_empty or self._current is None:
            return None
        block = self._current[1]
        return KeyExchange(
            trade=self._slots(trade, given=block.shift),
            own=slice(len(block.path), len(block.path) + block.end - block.start),
            are_known=self._is_backward,
        )

    def start_backward(self) -> None:
        """Expect the blocks in reverse order from here on."""
        self._is_backward = True
        # The last block ran last: its keys are live.
        self._current = None

    def _enter_forward(self, number: int, block: _Block, before: _Block) -> None:
        # Of the block that just ran, what lies on any path goes to the store, and what lies on the
        # next block's path also moves to the slots of its depth. The rest is overwritten.
        is_own = (self._stored >= before.start) & (self._stored < before.end)
        put_away = np.flatnonzero(is_own)
        kept, owned = np.searchsorted(block.path, [before.start, before.end]).tolist()
        away_from = self._index(self._stored[put_away] + before.shift)
        path_from = self._index(block.path[kept:owned] + before.shift)
        trade = None if self._peers is None else self._paths.before(number)
        slots = None
        if trade is not None and not trade.is_empty:
            slots = self._slots(trade, given=before.shift)
        for layer, carry in enumerate(self._carries):
            fetched = None if slots is None else slots.fetched(carry.key_KND, carry.value_KND)
            for both, buffer in enumerate((carry.key_KND, carry.value_KND)):
                if len(put_away):
                    store_UKD = self._store_MPUKD[layer, both]
                    away_UKD = buffer[:, away_from].transpose(0, 1)
                    # A block's tokens are contiguous in the layout, hence in the store too.
                    store_UKD[int(put_away[0]) : int(put_away[-1]) + 1].copy_(away_UKD)
                buffer[:, kept:owned] = buffer[:, path_from]
            if slots is not None and fetched is not None:
                slots.place(fetched, carry.key_KND, carry.value_KND)

    def _enter_backward(self, number: int, block: _Block, later: _Block) -> None:
        # The paths agree below `shared`; from there on the later one runs through this block.
        shared = self._paths.shared(number)
        self._load(number, block, shared=shared)
        owned = int(np.searchsorted(later.path, block.end))
        own = self._index(later.path[shared:owned] + block.shift)
        used = max(len(later.path), len(block.path) + block.end - block.start)
        trade = None if self._peers is None else self._paths.before(number + 1)
        slots = None
        if trade is not None and not trade.is_empty:
            slots = self._slots(trade, given=block.shift)
        for carry in self._carries:
            # Gradients that later blocks left on the path belong to this block's tokens: own ones
            # move to their slots, and the path starts from zero. Those below `shared` stay.
            owed = (carry.key_grad_KND, carry.value_grad_KND)
            returned = None if slots is None else slots.returned(*owed)
            for gradients in owed:
                of_block = gradients[:, shared:owned].clone()
                gradients[:, shared:used] = 0
                gradients[:, own] = of_block
            if slots is not None and returned is not None:
                slots.add(returned, *owed)

    def _load(self, number: int, block: _Block, *, shared: int) -> None:
        """Bring back the keys and values of this block's path from `shared` on."""
        path = block.path[shared:]
        is_stored = np.isin(path, self._stored, assume_unique=True)
        ranges = _ranges(
            np.searchsorted(self._stored, path[is_stored]), shared + np.flatnonzero(is_stored)
        )
        trade = None if self._peers is None else self._paths.back(number)
        slots, rows = None, torch.zeros(0, dtype=torch.int64)
        if trade is not None and not trade.is_empty:
            slots = self._slots(trade, given=0)
            rows = torch.from_numpy(np.searchsorted(self._stored, np.concatenate(trade.given)))
        for layer, carry in enumerate(self._carries):
            for both, buffer in enumerate((carry.key_KND, carry.value_KND)):
                for start, end, slot in ranges:
                    stored_UKD = self._store_MPUKD[layer, both, start:end]
                    buffer[:, slot : slot + end - start].transpose(0, 1).copy_(stored_UKD)
            if slots is not None:
                given_PCKD = self._store_MPUKD[layer][:, rows.to(self._store_MPUKD.device)]
                fetched = slots.swapped(given_PCKD.transpose(0, 1).to(self._shape.device))
                slots.place(fetched, carry.key_KND, carry.value_KND)

    def _slots(self, trade: Trade, *, given: int) -> KeyTrade:
        """The trade by slot: own tokens shifted by `given`, those of a path at their depth."""
        assert self._peers is not None
        return KeyTrade(
            peers=self._peers,
            given=tuple(self._index(tokens + given) for tokens in trade.given),
            taken=tuple(self._index(self._forest.position_N[tokens]) for tokens in trade.taken),
        )

    def _keys(self, block: _Block) -> BlockKeys:
        plan = attention_plan(self._pieces, start=block.start, end=block.end)
        seen = np.concatenate([block.path, np.arange(block.start, block.end)])
        return BlockKeys(
            plan=slot_plan(plan, position_N=self._forest.position_N, path_tokens=len(block.path)),
            carries=self._carries,
            subtree_end_S=self._forest.subtree_end_N[seen] + block.shift,
            position_S=self._forest.position_N[seen],
        )

    def _index(self, array: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._shape.device)


def _ranges(stored: Integers, slots: Integers) -> list[tuple[int, int, int]]:
    """(start, end, slot of the start) of every run of consecutive store indices and slots."""
    is_cut = (np.diff(stored) != 1) | (np.diff(slots) != 1)
    cuts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(stored)]
    return [
        (int(stored[first]), int(stored[last - 1]) + 1, int(slots[first]))
        for first, last in itertools.pairwise(cuts)
        if last > first
    ]
