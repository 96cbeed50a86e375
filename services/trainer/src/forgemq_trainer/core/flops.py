"""What training computes, by one published formula; the step's metrics and the load test share it.

6 W t + 14 Q L p + 8 H V r: W weights of the layers that a token uses, t tokens, Q query size,
L layers, p pairs that attention visits (forward two products, backward five), H width, V
vocabulary, r rows of the head (forward, again in backward, two gradients). Without the optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forgemq_trainer.core.logprobs import edges_of
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Floating-point operations of a forward and a backward, by where they happen."""

    weights: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.attention + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What trees save, over the groups of a step; 1 where there is nothing to compare.

    Attributes:
        flop_ratio: operations of training every request alone over those of the trees.
        flop_ratio_weights: the same of the layers' weights alone: the ratio of tokens.
        flop_ratio_attention: the same of attention alone: the ratio of visited pairs.
        branch_loss: tokens of the trees over those on the way to each episode's last sample: 1
            where histories only grow; above where they are rewritten (cut, stripped of reasoning,
            rendered anew).
    """

    flop_ratio: float
    flop_ratio_weights: float
    flop_ratio_attention: float
    branch_loss: float


def flops(shape: ModelShape, *, tokens: int, pairs: int, rows: int) -> Flops:
    """The formula of this module."""
    layer = 2 * shape.hidden * (shape.query_size + shape.key_size)
    layer += 3 * shape.hidden * shape.mlp_size + shape.hidden * shape.experts
    return Flops(
        weights=6.0 * shape.layers * layer * tokens,
        attention=14.0 * shape.layers * shape.query_size * pairs,
        head=8.0 * shape.hidden * shape.vocabulary * rows,
    )


def flops_of_tree(shape: ModelShape, forest: Forest) -> Flops:
    """Of a forest; siblings share the row of the head that they both continue."""
    rows = len(edges_of(forest, start=0, end=forest.token_count).source_R)
    return flops(shape, tokens=forest.token_count, pairs=forest.attention_pairs, rows=rows)


def savings(shape: ModelShape, forests: Sequence[Forest]) -> Savings:
    """Of the groups of a step."""
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
