"""Which rank trains what, in which round: a pure function of the step's trees and of the ranks.

Each rank holds shards of the parameters, so all ranks must gather them equally often and in the
same order. A step is therefore a list of rounds that every rank goes through. In an own round each
rank runs one microbatch forward and backward, or an empty one if it has none left. In a shared
round all ranks run one group together, each on its own part of the queries; this is for groups that
one rank's budget does not hold at once. A shared round has K blocks: K forwards without gradient,
then K forwards and backwards in reverse; K is the same on every rank.

Whole groups go to ranks by decreasing cost, each to the rank with the least cost so far. The cost
is the number of multiplications of the forward, from tokens and attention pairs.

N tokens of a forest, T tokens of a run.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from forgemq_trainer.core.flops import multiplications
from forgemq_trainer.core.memory import Microbatch, ModelShape
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.tree import Forest, Integers

Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRound:
    """Every rank runs a microbatch that no other rank runs.

    Attributes:
        microbatch_of_rank: Each of one block; None if the rank has none left and runs an empty one.
    """

    microbatch_of_rank: tuple[Microbatch | None, ...]

    @property
    def recomputed_layers(self) -> int:
        """The most of a rank; an empty microbatch recomputes as many."""
        return max(part.recomputed_layers for part in self.microbatch_of_rank if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRound:
    """All ranks run one group together.

    Attributes:
        group: Index into the step's forests.
        blocks: For each block of the group's layout, in order, the ranks' query ranges, in order,
            of at least one token each.
    """

    group: int
    blocks: tuple[tuple[Range, ...], ...]


Round: TypeAlias = OwnRound | SharedRound


def plan_rounds(
    forests: Sequence[Forest],
    *,
    shape: ModelShape,
    world_size: int,
    budget_bytes: int,
    head_chunk: int,
) -> tuple[Round, ...]:
    """The rounds of a step, the same on every rank.

    Example: two ranks and groups of cost 5, 4 and 3 that fit: rank 0 runs the first, rank 1 the
    other two. A group over the budget comes last, with half of its cost on each rank.

    Raises:
        ValueError: the budget is below the least that a group needs.
    """

    def planned(groups: Sequence[int]) -> list[Microbatch]:
        try:
            microbatches = plan_step(
                [forests[group] for group in groups],
                shape=shape,
                budget_bytes=budget_bytes,
                head_chunk=head_chunk,
            )
        except ValueError as error:
            raise ValueError(
                f"{error}; several ranks hold the keys and values of a whole tree, one rank alone "
                "offloads them"
            ) from error
        return [
            replace(part, groups=tuple(groups[index] for index in part.groups))
            for part in microbatches
        ]

    # A group without entries has no loss, hence no gradient.
    trained = [group for group, forest in enumerate(forests) if forest.entry_count]
    # A group that needs blocks by itself does not fit one rank: all ranks share it.
    alone = {group: planned([group])[0] for group in trained}
    split = [group for group in trained if len(alone[group].blocks) > 1]
    costs = {group: _cost(forests[group], shape=shape) for group in trained}
    whole = [group for group in trained if len(alone[group].blocks) == 1]
    microbatches = [
        planned(groups) for groups in balanced(whole, costs=costs, world_size=world_size)
    ]
    shared = (
        SharedRound(
            group=group,
            blocks=_shared_blocks(
                forests[group],
                shape=shape,
                tokens_max=_shared_tokens(
                    forests[group], shape=shape, budget_bytes=budget_bytes, head_chunk=head_chunk
                ),
                world_size=world_size,
            ),
        )
        for group in split
    )
    return (*_own_rounds(microbatches, costs=costs, shape=shape), *shared)


def balanced(
    groups: Sequence[int], *, costs: dict[int, int], world_size: int
) -> tuple[tuple[int, ...], ...]:
    """Each rank's groups, ascending. The costliest group first, each to the rank with the least."""
    loads = [0] * world_size
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    for group in sorted(groups, key=lambda group: (-costs[group], group)):
        rank = loads.index(min(loads))
        ranks[rank].append(group)
        loads[rank] += costs[group]
    return tuple(tuple(sorted(rank)) for rank in ranks)


def query_ranges(cost_T: Integers, *, start: int, parts: int) -> tuple[Range, ...]:
    """Contiguous ranges of about equal cost, at least one token each.

    Args:
        cost_T: Cost of each token, at least `parts` tokens.
        start: Layout index of the first token.
        parts: Number of ranges.
    """
    count = len(cost_T)
    before_T = np.cumsum(cost_T) - cost_T
    wanted = [before_T[-1] + cost_T[-1]] * parts
    bounds = [0]
    for part in range(1, parts):
        cut = int(np.searchsorted(before_T, wanted[part] * part // parts))
        # At least one token for this range, and one for each range after it.
        bounds.append(min(max(cut, bounds[-1] + 1), count - parts + part))
    bounds.append(count)
    return tuple((start + a, start + b) for a, b in itertools.pairwise(bounds))


def _own_rounds(
    microbatches: Sequence[Sequence[Microbatch]], *, costs: dict[int, int], shape: ModelShape
) -> list[OwnRound]:
    """The ranks' microbatches side by side, the costliest first.

    A round waits for its slowest rank, so microbatches of similar cost belong in one round.
    """

    def cost(microbatch: Microbatch) -> int:
        return sum(costs[group] for group in microbatch.groups)

    ordered = [sorted(rank, key=lambda part: (-cost(part), part.groups)) for rank in microbatches]
    rounds = [
        OwnRound(microbatch_of_rank=tuple(rank[n] if n < len(rank) else None for rank in ordered))
        for n in range(max(map(len, ordered)))
    ]
    return [_recomputing_alike(each) for each in rounds] if shape.expert_ranks > 1 else rounds


def _recomputing_alike(planned: OwnRound) -> OwnRound:
    """The round with as many layers recomputed on every rank as on the one with the most.

    A layer that runs forward again sends tokens to their experts again, and all ranks take part.
    The others would wait for that rank anyway.
    """
    return OwnRound(
        microbatch_of_rank=tuple(
            part and replace(part, recomputed_layers=planned.recomputed_layers)
            for part in planned.microbatch_of_rank
        )
    )


def _shared_tokens(forest: Forest, *, shape: ModelShape, budget_bytes: int, head_chunk: int) -> int:
    """The most tokens of one rank's range, beside the keys and values of the whole tree."""
    free_bytes = budget_bytes - shape.carry_bytes(forest.token_count)
    return shape.block_tokens(free_bytes, chunk=head_chunk, is_carried=True)


def _shared_blocks(
    forest: Forest, *, shape: ModelShape, tokens_max: int, world_size: int
) -> tuple[tuple[Range, ...], ...]:
    """The fewest even blocks in which no rank gets more than `tokens_max` tokens at once."""
    tokens = forest.token_count
    if tokens < world_size:
        raise ValueError(f"a tree of {tokens} tokens cannot be split between {world_size} ranks")
    per_token = multiplications(shape, tokens=1, attention_pairs=0)
    per_pair = multiplications(shape, tokens=0, attention_pairs=1)
    cost_N = per_token + per_pair * (forest.position_N + 1)
    # Ranges of equal cost have unequal lengths, so the longest range is known only once it is cut.
    # Fewer blocks than in equal lengths never fit.
    fewest = -(-tokens // (world_size * tokens_max))
    for count in range(fewest, tokens // world_size + 1):
        size = -(-tokens // count)
        blocks = tuple(
            query_ranges(cost_N[start : start + size], start=start, parts=world_size)
            for start in range(0, tokens, size)
            if tokens - start >= world_size
        )
        rest = blocks[-1][-1][1]
        if rest < tokens:  # Fewer tokens than ranks are left: they join the previous block.
            last = blocks[-1]
            blocks = (*blocks[:-1], (*last[:-1], (last[-1][0], tokens)))
        if max(end - start for ranges in blocks for start, end in ranges) <= tokens_max:
            return blocks
    raise ValueError(f"no block of {tokens} tokens leaves each of {world_size} ranks {tokens_max}")


def _cost(forest: Forest, *, shape: ModelShape) -> int:
    return multiplications(shape, tokens=forest.token_count, attention_pairs=forest.attention_pairs)
