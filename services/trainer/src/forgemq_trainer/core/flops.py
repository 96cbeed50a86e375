"""FLOPs of training by one formula, which the step's metrics and the load tests share.

    6 W t + 14 Q L p + 8 H V r

W weights of the layers that a token uses, t tokens, Q query size, L layers, p pairs that attention
visits, H width, V vocabulary, r rows of the head; the optimizer is excluded. In a layer with a
window of w tokens a query visits w pairs at most. If values are narrower than queries and keys,
14 Q is 8 times the size of queries and 6 times that of values. A product of matrices counts 2 for
each multiplication. So 6 is a forward and two gradients (Kaplan et al., arXiv
2001.08361, section 2.1); 14 is two products forward and five backward, as flash attention computes
scores again (Dao, arXiv 2307.08691, section 4.1); 8 is forward, forward again and two gradients.

Of a frozen model with adapters of A weights, the gradients of W and of the head are not computed:

    (4 W + 6 A) t + 14 Q L p + 6 H V r
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgemq_trainer.core.logprobs import edges_of
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import Forest, Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Floating-point operations of a forward and a backward."""

    weights: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """Sum of the three."""
        return self.weights + self.attention + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What trees save over the groups of a step; every ratio is 1 if there is nothing to compare.

    Attributes:
        flop_ratio: Operations of training every request alone over those of the trees.
        flop_ratio_weights: The same for the layers' weights alone: the ratio of tokens.
        flop_ratio_attention: The same for attention alone: the ratio of visited pairs.
        branch_loss: Tokens of the trees over those on the path to each episode's last sample. 1 if
            histories only grow; above 1 if they are rewritten (cut, stripped of reasoning, or
            rendered differently).
    """

    flop_ratio: float
    flop_ratio_weights: float
    flop_ratio_attention: float
    branch_loss: float


def flops(
    shape: ModelShape, *, tokens: int, pairs: int, rows: int, windowed_pairs: int = 0
) -> Flops:
    """FLOPs by the formula of this module; `windowed_pairs` are those of a layer with a window."""
    latent, windows, adapters = shape.parts.latent, shape.parts.windows, shape.adapters
    value_size = latent.heads * latent.value_size if latent else shape.query_size
    windowed_layers = windows.layers if windows else 0
    visited = (shape.layers - windowed_layers) * pairs + windowed_layers * windowed_pairs
    weights = 6.0 * layer_weights(shape)
    if adapters is not None:
        weights = 4.0 * layer_weights(shape) + 6.0 * shape.layers * adapters.parameters
    return Flops(
        weights=weights * tokens,
        attention=float((8 * shape.query_size + 6 * value_size) * visited),
        head=(8.0 if adapters is None else 6.0) * shape.hidden * shape.vocabulary * rows,
    )


def forward_of(cost: Flops, shape: ModelShape) -> Flops:
    """The part of these operations that a forward is."""
    shares = forward_shares(shape)
    return Flops(
        weights=cost.weights * shares.weights,
        attention=cost.attention * shares.attention,
        head=cost.head * shares.head,
    )


def forward_shares(shape: ModelShape) -> Flops:
    """Of one operation in each part, what a forward is; see the formula of this module."""
    attention = 4 / 14
    if shape.adapters is None:
        return Flops(weights=2 / 6, attention=attention, head=2 / 8)
    own, added = layer_weights(shape), shape.layers * shape.adapters.parameters
    weights = (2 * own + 2 * added) / (4 * own + 6 * added)
    return Flops(weights=weights, attention=attention, head=2 / 6)


def layer_weights(shape: ModelShape) -> int:
    """Weights of all layers that a token uses: projections, MLPs or chosen experts, routers."""
    parts, hidden = shape.parts, shape.hidden
    projections = 2 * hidden * (shape.query_size + shape.key_size)
    if parts.latent:
        projections = parts.latent.projection_size(hidden)
    routed = 3 * hidden * (shape.mlp_size + parts.shared_mlp_size) + hidden * shape.experts
    dense = 3 * hidden * parts.dense_mlp_size * parts.dense_layers
    return shape.layers * projections + (shape.layers - parts.dense_layers) * routed + dense


def gathered_weights(shape: ModelShape) -> int:
    """Weights of all layers that a rank computes with, its experts among them."""
    if not shape.experts:
        return layer_weights(shape)
    others = shape.experts // shape.expert_ranks - shape.experts_per_token
    of_expert = 3 * shape.hidden * shape.mlp_size // shape.experts_per_token
    return layer_weights(shape) + (shape.layers - shape.parts.dense_layers) * others * of_expert


def flops_of_tree(shape: ModelShape, forest: Forest) -> Flops:
    """FLOPs of a forest; sampled siblings share one row of the head."""
    return flops(
        shape,
        tokens=forest.token_count,
        pairs=forest.attention_pairs,
        windowed_pairs=_windowed_pairs(shape, forest.position_N),
        rows=len(edges_of(forest, start=0, end=forest.token_count).source_R),
    )


def savings(shape: ModelShape, forests: Sequence[Forest]) -> Savings:
    """What the groups' trees save over training every request alone."""
    trees = [flops_of_tree(shape, forest) for forest in forests]
    alone = flops(
        shape,
        tokens=sum(forest.request_tokens for forest in forests),
        pairs=sum(forest.request_pairs for forest in forests),
        windowed_pairs=sum(_windowed_request_pairs(shape, forest) for forest in forests),
        rows=sum(forest.entry_count for forest in forests),
    )
    trunk = sum(forest.trunk_tokens for forest in forests)
    return Savings(
        flop_ratio=_ratio(alone.total, [tree.total for tree in trees]),
        flop_ratio_weights=_ratio(alone.weights, [tree.weights for tree in trees]),
        flop_ratio_attention=_ratio(alone.attention, [tree.attention for tree in trees]),
        branch_loss=sum(forest.token_count for forest in forests) / trunk if trunk else 1.0,
    )


def _windowed_pairs(shape: ModelShape, position_N: Integers) -> int:
    """Pairs that tokens at these positions visit in a layer with a window; 0 without one."""
    windows = shape.parts.windows
    return int(np.minimum(position_N + 1, windows.size).sum()) if windows else 0


def _windowed_request_pairs(shape: ModelShape, forest: Forest) -> int:
    """The same of every request alone: a request of n tokens has one token at each position."""
    windows = shape.parts.windows
    if windows is None:
        return 0
    length_S = forest.sample_length_S
    near_S = np.minimum(length_S, windows.size)
    return int((near_S * (near_S + 1) // 2 + (length_S - near_S) * windows.size).sum())


def _ratio(alone: float, trees: Sequence[float]) -> float:
    together = sum(trees)
    return alone / together if together and alone else 1.0
