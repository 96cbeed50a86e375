"""How a step is cut into microbatches to fit a budget of bytes.

A pure function of the step's trees and the budget. Groups are packed side by side while their
activations fit; one without entries has nothing to learn from and runs in none, as on several
ranks. A group that does not fit runs whole with its first layers recomputed in backward, as few as
suffice. If it does not fit with all layers but one recomputed, it runs in blocks; their keys and
values off the live path stay in memory if the budget has room for that with at most
`KEPT_BLOCKS_RATIO` times the blocks that offloading needs, else they are offloaded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forgemq_trainer.core.memory import (
    BLOCK_TOKENS_MIN,
    Microbatch,
    ModelShape,
    least_budget_bytes,
)
from forgemq_trainer.core.path_counts import path_counts
from forgemq_trainer.core.tree import Forest

KEPT_BLOCKS_RATIO = 2
"""Up to so many times the blocks are accepted to avoid offloading, which costs up to 5 % of a step
on a CPU, or to keep weights gathered; beyond that, blocks get too short for the matrix products of
a GPU."""


def plan_step(
    forests: Sequence[Forest],
    *,
    shape: ModelShape,
    budget_bytes: int,
    head_chunk: int,
) -> tuple[Microbatch, ...]:
    """The microbatches of one process.

    Example: a budget for 100 tokens, or for 200 with all layers recomputed but one, and groups of
    60, 30, 150 and 250 tokens give the microbatches (0, 1) with everything kept, (2) with about
    half of the layers recomputed and (3) in blocks. Blocks run all layers, attention and the head
    forward once more; recomputed layers run their own matrix products once more. So a group that
    fits recomputed never runs in blocks.

    Raises:
        ValueError: the budget is below the least that a group needs.
    """

    def over_budget(group: int) -> Microbatch:
        recomputed = recomputed_microbatch(
            group, forests[group], shape=shape, budget_bytes=budget_bytes, head_chunk=head_chunk
        )
        if recomputed is not None:
            return recomputed
        return path_microbatch(
            group, forests[group], shape=shape, budget_bytes=budget_bytes, head_chunk=head_chunk
        )

    tokens = [forest.token_count for forest in forests]
    trained = [group for group, forest in enumerate(forests) if forest.entry_count]
    capacity = shape.block_tokens(budget_bytes, chunk=head_chunk, is_carried=False)
    return tuple(
        over_budget(groups[0])
        if sum(tokens[group] for group in groups) > capacity
        else _whole(groups, tokens=tokens, shape=shape, head_chunk=head_chunk)
        for groups in packed(trained, tokens=tokens, capacity=capacity)
    )


def recomputed_microbatch(
    group: int, forest: Forest, *, shape: ModelShape, budget_bytes: int, head_chunk: int
) -> Microbatch | None:
    """The group whole, with as few layers recomputed as fit; None if all but one do not suffice."""
    for count in range(1, shape.layers):
        needed = shape.block_bytes(
            forest.token_count, chunk=head_chunk, is_carried=False, recomputed_layers=count
        )
        if needed <= budget_bytes:
            return Microbatch(
                groups=(group,),
                blocks=((0, forest.token_count),),
                recomputed_layers=count,
                predicted_bytes=needed,
            )
    return None


def path_microbatch(
    group: int, forest: Forest, *, shape: ModelShape, budget_bytes: int, head_chunk: int
) -> Microbatch:
    """The group in the fewest even blocks that fit, with keys and values on the device if possible.

    They are offloaded if nothing else fits, or if keeping them would take more than
    `KEPT_BLOCKS_RATIO` times the blocks.

    Raises:
        ValueError: the budget is below the least.
    """
    offloaded: Microbatch | None = None
    for blocks in _even_blocks(forest.token_count):
        if offloaded is not None and len(blocks) > KEPT_BLOCKS_RATIO * len(offloaded.blocks):
            return offloaded
        needed = _path_bytes(forest, blocks, shape=shape, head_chunk=head_chunk)
        if needed.live + needed.stored <= budget_bytes:
            return Microbatch(
                groups=(group,), blocks=blocks, predicted_bytes=needed.live + needed.stored
            )
        if offloaded is None and needed.live <= budget_bytes:
            offloaded = Microbatch(
                groups=(group,), blocks=blocks, is_offloaded=True, predicted_bytes=needed.live
            )
    if offloaded is not None:
        return offloaded
    raise ValueError(
        budget_refusal(forest, shape=shape, budget_bytes=budget_bytes, head_chunk=head_chunk)
    )


def budget_refusal(forest: Forest, *, shape: ModelShape, budget_bytes: int, head_chunk: int) -> str:
    """Says which budget the tree needs, if it has no plan in this one."""
    longest = int(forest.position_N.max()) + 1
    least = least_budget_bytes(shape, longest_path=longest, head_chunk=head_chunk)
    return (
        f"trainer.memory_budget_bytes is {budget_bytes}, but a tree of {forest.token_count} tokens "
        f"with a longest path of {longest} needs at most {least}; raise it to that"
    )


def _even_blocks(tokens: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The tokens in 2 even blocks, then in more, down to blocks of the least size."""
    count = 1
    while count == 1 or -(-tokens // count) >= BLOCK_TOKENS_MIN:
        count += 1 + count // 8  # By an eighth at a time: a large tree has thousands of choices.
        size = max(BLOCK_TOKENS_MIN, -(-tokens // count))
        yield tuple((start, min(start + size, tokens)) for start in range(0, tokens, size))


@dataclass(frozen=True, slots=True)
class _PathBytes:
    live: int
    stored: int


def _path_bytes(
    forest: Forest, blocks: tuple[tuple[int, int], ...], *, shape: ModelShape, head_chunk: int
) -> _PathBytes:
    paths = path_counts(forest.position_N, [(block,) for block in blocks])
    lengths = [end - start for start, end in blocks]
    slots = max(map(sum, zip(paths.depth_KR[:, 0].tolist(), lengths, strict=True)))
    live = shape.block_bytes(max(lengths), chunk=head_chunk, is_carried=True)
    return _PathBytes(
        live=live + shape.carry_bytes(slots),
        stored=paths.stored() * shape.key_bytes_per_token,
    )


def _whole(
    groups: Sequence[int], *, tokens: Sequence[int], shape: ModelShape, head_chunk: int
) -> Microbatch:
    count = sum(tokens[group] for group in groups)
    return Microbatch(
        groups=tuple(groups),
        blocks=((0, count),),
        predicted_bytes=shape.block_bytes(count, chunk=head_chunk, is_carried=False),
    )


def packed(groups: Sequence[int], *, tokens: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Runs of groups whose tokens fit together; a group that does not fit is alone in its run."""
    runs: list[tuple[int, ...]] = []
    waiting: tuple[int, ...] = ()
    for group in groups:
        if tokens[group] > capacity:
            runs.append((group,))
            continue
        if sum(tokens[other] for other in waiting) + tokens[group] > capacity:
            runs.append(waiting)
            waiting = ()
        waiting = (*waiting, group)
    return [*runs, waiting] if waiting else runs
