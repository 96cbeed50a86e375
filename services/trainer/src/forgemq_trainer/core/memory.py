"""The bytes that a run of tokens needs, and how a step is cut to fit a budget.

A pure function of the step's trees and the budget. Groups are packed side by side while their
activations fit; a group that does not fit runs in blocks. A block of T tokens whose first token has
P ancestors needs

    block_bytes(T) + carry_bytes(P + T)

and, to keep keys and values in memory, U * key_bytes_per_token for the U tokens that lie on the
path of some block. If the budget has no room for these, or only with more than `KEPT_BLOCKS_RATIO`
times the blocks, they are offloaded. So the budget that always suffices follows from the longest
path alone: `least_budget_bytes`.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from forgemq_trainer.core.draft_memory import DraftShape
from forgemq_trainer.core.low_rank import AdapterShape
from forgemq_trainer.core.peak import Peak
from forgemq_trainer.core.tree import Forest

BLOCK_TOKENS_MIN = 64
"""In shorter blocks the kernels' fixed costs dominate; a budget that forces them is refused."""

ROUTE_BYTES = 32
"""Saved for one expert chosen for a token: four int64, which are the expert, the token, and the
pair's indices in the order of the experts and back."""

KEPT_BLOCKS_RATIO = 2
"""Up to so many times the blocks are accepted to avoid offloading, which costs up to 5 % of a step
on a CPU; beyond that, blocks get too short for the matrix products of a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that decide memory and cost.

    Attributes:
        layers: Decoder layers.
        hidden: Size of the residual stream.
        query_size: Query heads times head size.
        key_size: Key/value heads times head size.
        mlp_size: Intermediate size that a token uses (of experts: chosen ones times their size).
        vocabulary: Rows of the head.
        value_bytes: Of one activation.
        wide_bytes: Of one accumulated gradient or logit.
        is_head_normed: True if queries and keys are normed by head.
        experts: To choose from in each layer; 0 in a dense model.
        experts_per_token: Chosen for each token; 0 in a dense model.
        is_head_tied: True if the head's weights are the embedding's.
        slot_multiple: A carry's slots are rounded up to a multiple of this, for the attention.
        draft: Of the draft head that trains beside the model; None without one.
        adapters: That train in place of the model's own weights; None if these train.
    """

    layers: int
    hidden: int
    query_size: int
    key_size: int
    mlp_size: int
    vocabulary: int
    value_bytes: int
    wide_bytes: int
    is_head_normed: bool = True
    experts: int = 0
    experts_per_token: int = 0
    is_head_tied: bool = False
    slot_multiple: int = 1
    draft: DraftShape | None = None
    adapters: AdapterShape | None = None

    def saved_bytes_per_token(self, *, is_carried: bool) -> int:
        """Bytes that autograd keeps of one token between forward and backward, in all layers.

        Each norm's input and output and the residual stream; queries, output and its copy for the
        projection; keys and values, unless they lie in a carry; gate, up, product. With experts
        also the gate's activation, the router's probabilities of all of them, and for each chosen
        one its input, output and weight (and the weight again in the order of the experts),
        indices, and the expert route of the engine if there is one. Of a frozen model less
        (`AdapterShape.unkept_values`); experts count in full, which is an upper bound.
        """
        heads = 3 * self.query_size + (0 if is_carried else 2 * self.key_size)
        heads += self.query_size + self.key_size if self.is_head_normed else 0
        chosen = self.experts_per_token * 2 * self.hidden
        gated = (4 if self.experts else 3) * self.mlp_size
        values = 4 * self.hidden + heads + gated + chosen
        if self.adapters is not None:
            mlp_size = 0 if self.experts else self.mlp_size
            values -= self.adapters.unkept_values(self.hidden, self.query_size, mlp_size)
        weights = (self.experts + 2 * self.experts_per_token) * self.wide_bytes
        routes = weights + self.experts_per_token * (ROUTE_BYTES + self.expert_index_bytes)
        return self.layers * (values * self.value_bytes + routes)

    def block_bytes(self, tokens: int, *, chunk: int, is_carried: bool) -> int:
        """The most bytes of a block's forward and backward, without carries.

        At each peak there are, besides what autograd keeps, tensors of the residual stream's size:
        the embedding's output, the gradient of the decoder's output and, in a block, whose backward
        starts from that output too, the output itself. Backward starts with everything kept. The
        peaks come one after another, so the largest counts:

        - the head: a chunk, the rows that entries continue and their gradients;
        - a module of the decoder: `inner_bytes_per_token`;
        - the last layer's down projection: the gradients of its weights and of its input.

        During the last two, the gradient of a tied head is held until the embedding's is added.

        A draft head runs after that, on the decoder's output of all tokens: it is held until then,
        or offloaded if the tokens run in blocks.
        """
        return max(peak.bytes_of(tokens) for peak in self._peaks(chunk, is_carried=is_carried))

    def block_tokens(self, free_bytes: int, *, chunk: int, is_carried: bool) -> int:
        """Tokens of the longest block whose `block_bytes` fit; 0 if no block fits."""
        peaks = self._peaks(chunk, is_carried=is_carried)
        return max(0, min(peak.tokens_in(free_bytes) for peak in peaks))

    def _peaks(self, chunk: int, *, is_carried: bool) -> tuple[Peak, ...]:
        row = self.hidden * self.value_bytes
        held = 3 if is_carried or self.draft else 2
        kept = self.saved_bytes_per_token(is_carried=is_carried) + held * row
        is_frozen = self.adapters is not None
        head_grad = self.vocabulary * row if self.is_head_tied and not is_frozen else 0
        input_grad = self.mlp_size * self.value_bytes
        width = self.mlp_size
        if self.experts:
            width = self.mlp_size // self.experts_per_token * self.experts
        return (
            Peak(fixed_bytes=self.head_bytes(chunk=chunk), token_bytes=kept + 2 * row),
            Peak(fixed_bytes=head_grad, token_bytes=kept + self.inner_bytes_per_token),
            Peak(
                fixed_bytes=0 if is_frozen else head_grad + width * row,
                token_bytes=kept + input_grad,
            ),
            *(self.draft.peaks(chunk=chunk, is_carried=is_carried) if self.draft else ()),
        )

    @property
    def inner_bytes_per_token(self) -> int:
        """The most bytes that one token's backward holds inside a module of the decoder.

        - The last norm: its incoming gradient and two wide tensors; in a narrow dtype also the
          widened gradient and the result.
        - The last layer's MLP: the gradients of its activation and of up.
        - Experts: for each chosen one the gradient of its output in the order of the tokens and in
          the order of the experts, and the product of that gradient with the output. All are wide,
          as the routing weights are.
        """
        is_narrow = self.value_bytes < self.wide_bytes
        norm = self.value_bytes + 2 * self.wide_bytes
        norm += self.wide_bytes + self.value_bytes if is_narrow else 0
        experts = 3 * self.experts_per_token * self.wide_bytes
        return max(self.hidden * max(norm, experts), 2 * self.mlp_size * self.value_bytes)

    @property
    def expert_index_bytes(self) -> int:
        """Bytes of the narrowest index that holds 0 to `experts`, the last for "no expert"."""
        return 1 if self.experts < 1 << 8 else 2

    @property
    def key_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, or in a draft head's if larger."""
        own = 2 * self.layers * self.key_size * self.value_bytes
        return max(own, self.draft.key_bytes_per_token if self.draft else 0)

    @property
    def carry_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, and of their gradients."""
        own = 2 * self.layers * self.key_size * (self.value_bytes + self.wide_bytes)
        return max(own, self.draft.carry_bytes_per_token if self.draft else 0)

    def carry_bytes(self, slots: int) -> int:
        """Bytes of the carries of all layers with at least so many slots."""
        return -(-slots // self.slot_multiple) * self.slot_multiple * self.carry_bytes_per_token

    def head_bytes(self, *, chunk: int) -> int:
        """The most bytes of the head's forward and backward.

        Forward: logits of a chunk and two temporaries. Backward: the weights' gradient, and the
        logits' gradients of two chunks, as one is freed only when the next exists. A narrow dtype
        adds the widened weights throughout and, at the end, the rounded gradient beside one chunk.
        The head of a frozen model has no gradient.
        """
        logits = chunk * self.vocabulary * self.wide_bytes
        if self.adapters is not None:
            widened = self.value_bytes < self.wide_bytes
            return 3 * logits + widened * self.hidden * self.vocabulary * self.wide_bytes
        weights = self.hidden * self.vocabulary * self.wide_bytes
        if self.value_bytes == self.wide_bytes:
            return max(3 * logits, 2 * logits + weights)
        narrowed = self.hidden * self.vocabulary * self.value_bytes
        return weights + max(3 * logits, weights + logits + max(logits, narrowed))

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
        groups: Indices into the step's forests, ascending.
        blocks: (start, end) over the joint layout, in order; one block if everything fits.
        is_offloaded: True if keys and values off the live path go to the policy's offload store.
        predicted_bytes: The most that it holds at once, without parameters and their gradients; 0
            if ranks share the group.
    """

    groups: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    is_offloaded: bool = False
    predicted_bytes: int = 0


def plan_step(
    forests: Sequence[Forest],
    *,
    shape: ModelShape,
    budget_bytes: int,
    head_chunk: int,
    carried: Literal["forest", "path"] = "forest",
) -> tuple[Microbatch, ...]:
    """The microbatches of one process.

    With `carried="path"` blocks hold the keys of the live path only, as in a process that runs a
    group alone; with "forest" those of all tokens, as in ranks that run one group together.

    Example: a budget for 100 tokens and groups of 60, 30 and 150 tokens give the microbatches
    (0, 1) in one block and (2) in several.

    Raises:
        ValueError: the budget is below the least that a group needs.
    """

    def in_blocks(group: int) -> Microbatch:
        if carried == "forest":
            blocks = _blocks(
                forests[group].token_count,
                shape=shape,
                budget_bytes=budget_bytes,
                head_chunk=head_chunk,
            )
            return Microbatch(groups=(group,), blocks=blocks)
        return path_microbatch(
            group, forests[group], shape=shape, budget_bytes=budget_bytes, head_chunk=head_chunk
        )

    tokens = [forest.token_count for forest in forests]
    capacity = shape.block_tokens(budget_bytes, chunk=head_chunk, is_carried=False)
    return tuple(
        in_blocks(groups[0])
        if sum(tokens[group] for group in groups) > capacity
        else _whole(groups, tokens=tokens, shape=shape, head_chunk=head_chunk)
        for groups in packed(range(len(forests)), tokens=tokens, capacity=capacity)
    )


def least_budget_bytes(shape: ModelShape, *, longest_path: int, head_chunk: int) -> int:
    """The least budget in which every tree with this longest path trains.

    A little less may suffice for a tree whose blocks all start at shallower tokens.

    Args:
        shape: The model's sizes.
        longest_path: Tokens from a root to the deepest leaf.
        head_chunk: Rows of logits that exist at once.
    """
    return shape.block_bytes(
        BLOCK_TOKENS_MIN, chunk=head_chunk, is_carried=True
    ) + shape.carry_bytes(longest_path + BLOCK_TOKENS_MIN)


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
    longest = int(forest.position_N.max()) + 1
    least = least_budget_bytes(shape, longest_path=longest, head_chunk=head_chunk)
    raise ValueError(
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
    size = max(end - start for start, end in blocks)
    slots = max(int(forest.position_N[start]) + end - start for start, end in blocks)
    return _PathBytes(
        live=shape.block_bytes(size, chunk=head_chunk, is_carried=True) + shape.carry_bytes(slots),
        stored=_path_tokens(forest, [start for start, _ in blocks]) * shape.key_bytes_per_token,
    )


def _path_tokens(forest: Forest, starts: Sequence[int]) -> int:
    """How many tokens are an ancestor of at least one of the starts, which ascend.

    An ancestor of a start that lies before the PREVIOUS start is that one's ancestor too and
    already counted, so each start adds only its ancestors from the previous start on.
    """
    first_M, parent_M = forest.segment_start_M.tolist(), forest.segment_parent_M.tolist()
    counted = previous = 0
    for start in starts:
        above = int(forest.parent_N[start])
        segment = bisect_right(first_M, above) - 1
        while above >= previous:
            counted += above + 1 - max(first_M[segment], previous)
            above, segment = int(forest.parent_N[first_M[segment]]), parent_M[segment]
        previous = start
    return counted


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


def _blocks(
    tokens: int, *, shape: ModelShape, budget_bytes: int, head_chunk: int
) -> tuple[tuple[int, int], ...]:
    carry_bytes = shape.carry_bytes(tokens)
    free_bytes = budget_bytes - carry_bytes
    size = shape.block_tokens(free_bytes, chunk=head_chunk, is_carried=True)
    if size < BLOCK_TOKENS_MIN:
        least = shape.block_bytes(BLOCK_TOKENS_MIN, chunk=head_chunk, is_carried=True)
        raise ValueError(
            f"trainer.memory_budget_bytes is {carry_bytes + least - budget_bytes} bytes too small "
            f"for a tree of {tokens} tokens"
        )
    count = -(-tokens // size)
    even = -(-tokens // count)
    return tuple((start, min(start + even, tokens)) for start in range(0, tokens, even))
