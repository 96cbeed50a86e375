"""FLOPs of each token of a forest, by the formula of `flops`.

N tokens.
"""

from dataclasses import dataclass

import numpy as np

from forgemq_trainer.core.draft_flops import DraftFlops, draft_flops
from forgemq_trainer.core.flops import flops
from forgemq_trainer.core.logprobs import edges_of
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import Forest, Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """FLOPs of the forward and backward of each token; whole numbers, so sums have no order.

    Attributes:
        weights: Of one token in the layers' products.
        attention_N: Of each token's pairs.
        head_N: Of the rows of the head that continue each token.
        draft: Of each token in a draft head.
    """

    weights: int
    attention_N: Integers
    head_N: Integers
    draft: DraftFlops


def token_flops(shape: ModelShape, forest: Forest) -> TokenFlops:
    """Of a forest's tokens; without a draft head's they add up to `flops_of_tree`."""
    windows = shape.parts.windows
    pairs_N = forest.position_N + 1
    near_N = np.minimum(pairs_N, windows.size) if windows else np.zeros_like(pairs_N)
    pair = flops(shape, tokens=0, pairs=1, rows=0).attention
    near = flops(shape, tokens=0, pairs=0, rows=0, windowed_pairs=1).attention
    row = flops(shape, tokens=0, pairs=0, rows=1).head
    sources = edges_of(forest, start=0, end=forest.token_count).source_R.numpy()
    rows_N = np.bincount(sources, minlength=forest.token_count)
    return TokenFlops(
        weights=int(flops(shape, tokens=1, pairs=0, rows=0).weights),
        attention_N=int(pair) * pairs_N + int(near) * near_N,
        head_N=int(row) * rows_N,
        draft=draft_flops(shape.draft, forest.position_N),
    )
