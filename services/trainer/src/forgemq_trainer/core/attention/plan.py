"""Which pieces of attention a run of tokens needs: causal triangles and full rectangles.

The children of a token that do not follow it directly ("light") lie side by side in the layout.
So the whole tree mask is one triangle for each chain (a maximal run of segments that follow one
another) and one rectangle for each segment with light children: all light subtrees against the
chain up to the segment's end. Every visible pair lies in exactly one piece, and every piece is a
contiguous range of queries against a contiguous range of keys.

Example: segments R = [0, 4), its children A = [4, 7) and B = [7, 9). A follows R directly, so the
chains are R with A, [0, 7), and B, [7, 9): two triangles. B is light: one rectangle, queries
[7, 9) against keys [0, 4).

M segments, C chains, B segments with light children, R rectangles, K pieces of cut chains.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from forgemq_trainer.core.tree import Forest, Integers

Range: TypeAlias = tuple[int, int]
"""(start, end) of contiguous queries or keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Pieces of the queries [start, end), in the coordinates of the forest's layout.

    Attributes:
        start: First query.
        end: One past the last query.
        triangles: (start, end): queries and keys are the same range, causal.
        rectangles: (query_start, query_end, key_start, key_end): every query sees every key.
    """

    start: int
    end: int
    triangles: tuple[Range, ...]
    rectangles: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestPieces:
    """Pieces of a whole forest: chains as rows (start, end), rectangles as rows of four."""

    chain_C2: Integers
    rectangle_R4: Integers


def pieces(forest: Forest) -> ForestPieces:
    """Triangles and rectangles of a forest, in layout order; O(segments)."""
    start_M, end_M = forest.segment_start_M, forest.segment_end_M
    segment_M = np.arange(len(start_M))
    continues_M = (forest.segment_parent_M == segment_M - 1) & (segment_M > 0)
    head_C = np.flatnonzero(~continues_M)
    chain_of_M = np.cumsum(~continues_M) - 1
    last_C = np.append(head_C[1:], len(start_M)) - 1
    chain_C2 = np.stack([start_M[head_C], end_M[last_C]], axis=1)
    subtree_end_M = forest.subtree_end_N[start_M]
    # The first child, if any, is the next segment; what lies beyond its subtree is light.
    has_child_M = np.append(continues_M[1:], False)
    light_start_M = np.where(has_child_M, np.append(subtree_end_M[1:], 0), subtree_end_M)
    branches_B = np.flatnonzero(light_start_M < subtree_end_M)
    rectangle_R4 = np.stack(
        [
            light_start_M[branches_B],
            subtree_end_M[branches_B],
            chain_C2[chain_of_M[branches_B], 0],
            end_M[branches_B],
        ],
        axis=1,
    )
    return ForestPieces(chain_C2=chain_C2, rectangle_R4=rectangle_R4)


def attention_plan(whole: ForestPieces, *, start: int, end: int) -> AttentionPlan:
    """The pieces of the queries [start, end); all their keys lie before `end`."""
    chain_C2 = np.clip(whole.chain_C2, start, end)
    is_cut_C = chain_C2[:, 0] < chain_C2[:, 1]
    # What a chain had before this block is a rectangle of keys that are already known.
    began_C = is_cut_C & (whole.chain_C2[:, 0] < start)
    before_K4 = np.stack(
        [
            chain_C2[began_C, 0],
            chain_C2[began_C, 1],
            whole.chain_C2[began_C, 0],
            chain_C2[began_C, 0],
        ],
        axis=1,
    )
    rectangle_R4 = whole.rectangle_R4.copy()
    rectangle_R4[:, :2] = np.clip(rectangle_R4[:, :2], start, end)
    rectangle_R4 = rectangle_R4[rectangle_R4[:, 0] < rectangle_R4[:, 1]]
    rows = np.concatenate([before_K4, rectangle_R4]).tolist()
    return AttentionPlan(
        start=start,
        end=end,
        triangles=tuple((first, last) for first, last in chain_C2[is_cut_C].tolist()),
        rectangles=tuple((q0, q1, k0, k1) for q0, q1, k0, k1 in rows),
    )
