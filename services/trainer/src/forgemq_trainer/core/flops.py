"""FLOPs of training by one formula, which the step's metrics and the load tests share.

    6 W t + 14 Q L p + 8 H V r

W weights of the layers that a token uses, t tokens, Q query size, L layers, p pairs that attention
visits, H width, V vocabulary, r rows of the head; the optimizer is excluded. A product of matrices
counts 2 for each multiplication. So 6 is a forward and two gradients (Kaplan et al., arXiv
2001.08361, section 2.1); 14 is two products forward and five backward, as flash attention computes
scores again (Dao, arXiv 2307.08691, section 4.1); 8 is forward, forward again and two gradients.

Of a frozen model with adapters of A weights, the gradients of W and of the head are not computed:

    (4 W + 6 A) t + 14 Q L p + 6 H V r
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forgemq_trainer.core.logprobs import edges_of
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import Forest


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


def flops(shape: ModelShape, *, tokens: int, pairs: int, rows: int) -> Flops:
    """FLOPs by the formula of this module."""
    layer = 2 * shape.hidden * (shape.query_size + shape.key_size)
    layer += 3 * shape.hidden * shape.mlp_size + shape.hidden * shape.experts
    adapters = shape.adapters
    trained = 6.0 * layer if adapters is None else 4.0 * layer + 6.0 * adapters.parameters
    return Flops(
        weights=shape.layers * trained * tokens,
        attention=14.0 * shape.layers * shape.query_size * pairs,
        head=(8.0 if adapters is None else 6.0) * shape.hidden * shape.vocabulary * rows,
    )


def flops_of_tree(shape: ModelShape, forest: Forest) -> Flops:
    """FLOPs of a forest; sampled siblings share one row of the head."""
    rows = len(edges_of(forest, start=0, end=forest.token_count).source_R)
    return flops(shape, tokens=forest.token_count, pairs=forest.attention_pairs, rows=rows)


def savings(shape: ModelShape, forests: Sequence[Forest]) -> Savings:
    """What the groups' trees save over training every request alone."""
    trees = [flops_of_tree(shape, forest) for forest in forests]
    alone = flops(
        shape,
        tokens=sum(forest.request_tokens for forest in forests),
        pairs=sum(forest.request_pairs for forest in forests),
        rows=sum(forest.entry_count for forest in forests),
    )
    trunk = sum(forest.trunk_tokens for forest in forests)
    return Savings(
        flop_ratio=_ratio(alone.total, [tree.total for tree in trees]),
        flop_ratio_weights=_ratio(alone.weights, [tree.weights for tree in trees]),
        flop_ratio_attention=_ratio(alone.attention, [tree.attention for tree in trees]),
        branch_loss=sum(forest.token_count for forest in forests) / trunk if trunk else 1.0,
    )


def _ratio(alone: float, trees: Sequence[float]) -> float:
    together = sum(trees)
    return alone / together if together and alone else 1.0
