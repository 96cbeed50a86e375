"""Which pieces of attention are left if a query sees only its nearest ancestors.

A window of W shows a query itself and its W - 1 nearest ancestors. Distances are those of positions
in a sample and not of the layout, in which other branches lie between a token and its ancestors.
The pieces are those of the plan, cut: along a chain, and along a run of keys, layout and position
advance together, so what is visible of a triangle or a rectangle is a band of diagonals.

Example: a chain of 300 queries and a window of 100. Queries 0 to 99 see all that is before them: a
triangle. Queries 100 to 227 see keys 1 to 227, queries 228 to 299 keys 129 to 299: two bands.

S slots of keys and queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from forgemq_trainer.core.attention.plan import AttentionPlan, Range
from forgemq_trainer.core.tree import Integers

BAND_QUERIES = 128
"""Queries of a band at most. A band reads the keys of all its queries, so more of them would
compute more scores that the window hides; fewer would make the kernel's fixed costs count."""

Rectangle: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Queries and keys of which the window shows some pairs.

    Attributes:
        queries: (start, end) of slots, with consecutive positions; each sees at least one key.
        keys: (start, end) of slots, with consecutive positions.
        distance: Position of the first query minus that of the first key.
    """

    queries: Range
    keys: Range
    distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedPlan:
    """The pieces of a plan that a window leaves.

    Attributes:
        window: Keys that a query sees at most, itself among them.
        plan: Pieces of which every pair is visible, as without a window.
        bands: Pieces of which some pairs are.
    """

    window: int
    plan: AttentionPlan
    bands: tuple[Band, ...]


def windowed(plan: AttentionPlan, position_S: Integers, *, window: int) -> WindowedPlan:
    """The plan under a window.

    Args:
        plan: Pieces of the run.
        position_S: Position in its sample of each slot, in the coordinates of the plan.
        window: At least 1.
    """
    triangles: list[Range] = []
    rectangles: list[Rectangle] = []
    bands: list[Band] = []
    for start, end in plan.triangles:
        triangles.append((start, min(end, start + window)))
        bands += [
            Band(queries=(first, last), keys=(first - window + 1, last), distance=window - 1)
            for first, last in _tiles(start + window, end)
        ]
    for row in plan.rectangles:
        furthest = position_S[row[0] : row[1]].max() - position_S[row[2] : row[3]].min()
        if furthest < window:
            rectangles.append(row)
            continue
        for piece in _straight(row, position_S):
            whole, cut = _cut(piece, position_S, window=window)
            rectangles += whole
            bands += cut
    return WindowedPlan(
        window=window,
        plan=replace(plan, triangles=tuple(triangles), rectangles=tuple(rectangles)),
        bands=tuple(bands),
    )


def band_mask(band: Band, *, window: int, rows_per_query: int, dtype: torch.dtype) -> Tensor:
    """What to add to the scores of a band: 0, or minus infinity beyond the window.

    Args:
        band: Its queries and keys.
        window: Keys that a query sees at most.
        rows_per_query: Query heads of a key head, which are rows one after another.
        dtype: Of the queries: the kernel reads a float32 mask of float64 queries as float64.

    Returns:
        [queries * rows_per_query, keys], on the host.
    """
    query = torch.arange(band.queries[1] - band.queries[0]).repeat_interleave(rows_per_query)
    key = torch.arange(band.keys[1] - band.keys[0])
    distance = band.distance + query[:, None] - key
    is_visible = (distance >= 0) & (distance < window)
    return torch.zeros(distance.shape, dtype=dtype).masked_fill_(~is_visible, -torch.inf)


def _cut(
    piece: Rectangle, position_S: Integers, *, window: int
) -> tuple[list[Rectangle], list[Band]]:
    """Of a rectangle of consecutive positions, what is visible as a whole and what as bands."""
    start, end, key_start, key_end = piece
    away = int(position_S[start]) - int(position_S[key_start])
    # The last key is the nearest; a query that does not see it sees none.
    end = min(end, start + window - (away - (key_end - 1 - key_start)))
    whole: list[Rectangle] = []
    bands: list[Band] = []
    for first, last in _tiles(start, end):
        nearest = away + first - start
        seen_from = max(key_start, key_start + nearest - window + 1)
        distance = nearest - (seen_from - key_start)
        if distance + last - 1 - first < window:
            whole.append((first, last, seen_from, key_end))
        else:
            bands.append(Band(queries=(first, last), keys=(seen_from, key_end), distance=distance))
    return whole, bands


def _straight(row: Rectangle, position_S: Integers) -> Iterator[Rectangle]:
    """A rectangle as rectangles whose queries and keys have consecutive positions."""
    for key_start, key_end in _runs(position_S, row[2], row[3]):
        for start, end in _runs(position_S, row[0], row[1]):
            yield start, end, key_start, key_end


def _runs(position_S: Integers, start: int, end: int) -> list[Range]:
    cuts = (np.flatnonzero(np.diff(position_S[start:end]) != 1) + start + 1).tolist()
    return list(zip([start, *cuts], [*cuts, end], strict=True))


def _tiles(start: int, end: int) -> list[Range]:
    return [(first, min(first + BAND_QUERIES, end)) for first in range(start, end, BAND_QUERIES)]
