"""How many bytes a run of tokens needs, and how a step is cut to fit a budget.

A pure function of the step, the world size and the budget. Groups go to ranks by cost; the groups
of a rank are packed side by side while their activations fit; a group that does not fit runs in
blocks, whose keys, values and their gradients are carried. The least possible budget for a tree of
N tokens is `head + N * carry_bytes_per_token + activation_bytes_per_token`: one token a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forgemq.trainer.core.tree import Forest

BLOCK_TOKENS_MIN = 64
"""Below it the kernels' fixed costs dominate; a budget that forces it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that decide memory and cost.

    Attributes:
        layers: decoder layers.
        hidden: size of the residual stream.
        query_size: query heads times head size.
        key_size: key/value heads times head size.
        mlp_size: intermediate size that a token uses (experts chosen times theirs).
        vocabulary: rows of the head.
        value_bytes: of one activation.
        wide_bytes: of one accumulated gradient or logit.
    """

    layers: int
    hidden: int
    query_size: int
    key_size: int
    mlp_size: int
    vocabulary: int
    value_bytes: int
    wide_bytes: int

    @property
    def activation_bytes_per_token(self) -> int:
        """Tensors that autograd keeps: both norms' inputs and outputs, attention, MLP."""
        values = 4 * self.hidden + 4 * self.query_size + 6 * self.key_size + 4 * self.mlp_size
        return self.layers * values * self.value_bytes

    @property
    def carry_bytes_per_token(self) -> int:
        """Keys and values of all layers, and their gradients."""
        return 2 * self.layers * self.key_size * (self.value_bytes + self.wide_bytes)

    def head_bytes(self, *, chunk: int) -> int:
        """Logits, their softmax and one temporary, of one chunk; the head's gradient."""
        return (3 * chunk + 2 * self.hidden) * self.vocabulary * self.wide_bytes

    def cost(self, *, tokens: int, attention_pairs: int) -> int:
        """Forward multiplications of a tree without its head, for balancing ranks."""
        linear = (
            2 * self.hidden * (self.query_size + self.key_size) + 3 * self.hidden * self.mlp_size
        )
        return self.layers * (tokens * linear + 2 * attention_pairs * self.query_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Groups that run side by side, and the blocks of their joint layout.

    Attributes:
        groups: indices into the step's forests, ascending.
        blocks: (start, end) over the joint layout, in order; one where everything fits.
    """

    groups: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]


def plan_step(
    forests: Sequence[Forest],
    *,
    shape: ModelShape,
    world_size: int,
    budget_bytes: int,
    head_chunk: int,
) -> tuple[tuple[Microbatch, ...], ...]:
    """The microbatches of every rank.

    Example: budget for 100 tokens, groups of 60, 30 and 150 tokens on one rank give the
    microbatches (0, 1) in one block and (2) in several.

    Raises:
        ValueError: the budget is below the least that a group needs.
    """
    costs = [
        shape.cost(tokens=forest.token_count, attention_pairs=forest.attention_pairs)
        for forest in forests
    ]
    loads = [0] * world_size
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    for group in sorted(range(len(forests)), key=lambda group: (-costs[group], group)):
        rank = loads.index(min(loads))
        ranks[rank].append(group)
        loads[rank] += costs[group]
    tokens = [forest.token_count for forest in forests]
    free_bytes = budget_bytes - shape.head_bytes(chunk=head_chunk)
    return tuple(
        _microbatches(sorted(groups), tokens=tokens, shape=shape, free_bytes=free_bytes)
        for groups in ranks
    )


def _microbatches(
    groups: list[int], *, tokens: list[int], shape: ModelShape, free_bytes: int
) -> tuple[Microbatch, ...]:
    capacity = max(0, free_bytes) // shape.activation_bytes_per_token
    packed: list[Microbatch] = []
    open_groups: list[int] = []
    open_tokens = 0
    for group in groups:
        if tokens[group] > capacity:
            blocks = _blocks(tokens[group], shape=shape, free_bytes=free_bytes)
            packed.append(Microbatch(groups=(group,), blocks=blocks))
            continue
        if open_tokens + tokens[group] > capacity:
            packed.append(Microbatch(groups=tuple(open_groups), blocks=((0, open_tokens),)))
            open_groups, open_tokens = [], 0
        open_groups.append(group)
        open_tokens += tokens[group]
    if open_groups:
        packed.append(Microbatch(groups=tuple(open_groups), blocks=((0, open_tokens),)))
    return tuple(packed)


def _blocks(tokens: int, *, shape: ModelShape, free_bytes: int) -> tuple[tuple[int, int], ...]:
    carry_bytes = tokens * shape.carry_bytes_per_token
    size = (free_bytes - carry_bytes) // shape.activation_bytes_per_token
    if size < BLOCK_TOKENS_MIN:
        short = carry_bytes + BLOCK_TOKENS_MIN * shape.activation_bytes_per_token - free_bytes
        raise ValueError(
            f"trainer.memory_budget_bytes is {short} bytes too small for a tree of {tokens} tokens"
        )
    count = -(-tokens // size)
    even = -(-tokens // count)
    return tuple((start, min(start + even, tokens)) for start in range(0, tokens, even))
