"""FLOPs of each token of a layout, by the formula of `flops`, for cutting it into even parts.

N tokens of a layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgemq_trainer.core.flops import Flops, flops
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
        total_N: The sum of the three.
    """

    weights: int
    attention_N: Integers
    head_N: Integers
    total_N: Integers

    def of(self, start: int, end: int) -> Flops:
        """Of the tokens [start, end)."""
        return Flops(
            weights=float(self.weights * (end - start)),
            attention=float(self.attention_N[start:end].sum()),
            head=float(self.head_N[start:end].sum()),
        )


def token_flops(shape: ModelShape, forest: Forest) -> TokenFlops:
    """Of a forest's tokens; they add up to `flops_of_tree`."""
    windows = shape.parts.windows
    pairs_N = forest.position_N + 1
    near_N = np.minimum(pairs_N, windows.size) if windows else np.zeros_like(pairs_N)
    pair = flops(shape, tokens=0, pairs=1, rows=0).attention
    near = flops(shape, tokens=0, pairs=0, rows=0, windowed_pairs=1).attention
    row = flops(shape, tokens=0, pairs=0, rows=1).head
    sources = edges_of(forest, start=0, end=forest.token_count).source_R.numpy()
    rows_N = np.bincount(sources, minlength=forest.token_count)
    weights = int(flops(shape, tokens=1, pairs=0, rows=0).weights)
    attention_N = int(pair) * pairs_N + int(near) * near_N
    head_N = int(row) * rows_N
    return TokenFlops(
        weights=weights,
        attention_N=attention_N,
        head_N=head_N,
        total_N=weights + attention_N + head_N,
    )


def side_by_side(layouts: Sequence[TokenFlops]) -> TokenFlops:
    """Of several layouts of one model, one after the other."""
    if len(layouts) == 1:
        return layouts[0]
    return TokenFlops(
        weights=layouts[0].weights,
        attention_N=np.concatenate([each.attention_N for each in layouts]),
        head_N=np.concatenate([each.head_N for each in layouts]),
        total_N=np.concatenate([each.total_N for each in layouts]),
    )
