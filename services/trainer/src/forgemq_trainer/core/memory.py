"""The bytes that a run of tokens needs, by the model's sizes.

A forest of T tokens that runs whole needs `block_bytes(T)`, less if some of its layers are
recomputed in backward. A block of T tokens whose first token has P ancestors needs

    block_bytes(T) + carry_bytes(P + T)

and, to keep keys and values in memory, U * key_bytes_per_token for the U tokens that lie on the
path of some block. Without these the budget that always suffices follows from the longest path
alone: `least_budget_bytes`. `microbatches` cuts a step to fit a budget.
"""

from dataclasses import dataclass, replace

from forgemq_trainer.core.draft_memory import DraftShape
from forgemq_trainer.core.layer_parts import COMMON_PARTS, EXPERT_KEPT, MLP_KEPT, LayerParts
from forgemq_trainer.core.low_rank import AdapterShape
from forgemq_trainer.core.peak import Peak, most_bytes
from forgemq_trainer.core.spread_experts import ROWS_RATIO

BLOCK_TOKENS_MIN = 64
"""In shorter blocks the kernels' fixed costs dominate; a budget that forces them is refused."""

ROUTE_BYTES = 32
"""Saved for one expert chosen for a token: four int64, which are the expert, the token, and the
pair's indices in the order of the experts and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that decide memory and cost.

    Attributes:
        layers: Decoder layers.
        hidden: Size of the residual stream.
        query_size: Query heads times head size.
        query_heads: Each has one log-sum-exp a token.
        key_size: Key/value heads times head size.
        mlp_size: Intermediate size that a token uses (of experts: chosen ones times their size).
        vocabulary: Rows of the head.
        value_bytes: Of one activation.
        wide_bytes: Of one accumulated gradient or logit.
        is_head_normed: True if queries and keys are normed by head.
        experts: To choose from in each layer; 0 in a dense model.
        experts_per_token: Chosen for each token; 0 in a dense model.
        expert_ranks: Ranks over which each layer's experts are spread; 1 if each rank runs its own
            tokens through all of them.
        is_head_tied: True if the head's weights are the embedding's.
        slot_multiple: A carry's slots are rounded up to a multiple of this, for the attention.
        parts: What layers have besides, or in place of, the common parts.
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
    query_heads: int = 1
    is_head_normed: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_ranks: int = 1
    is_head_tied: bool = False
    slot_multiple: int = 1
    parts: LayerParts = COMMON_PARTS
    draft: DraftShape | None = None
    adapters: AdapterShape | None = None

    def saved_bytes_per_token(self, *, is_carried: bool, recomputed_layers: int = 0) -> int:
        """Bytes that autograd keeps of one token between forward and backward, in all layers.

        Each norm's input and output and the residual stream; queries, output and its copy for the
        projection; keys and values, unless they lie in a carry; gate, up, product. With experts
        also the gate's activation, the router's probabilities of all of them, and for each chosen
        one its input, output and weight (and the weight again in the order of the experts),
        indices, and the expert route of the engine if there is one. If experts are spread over
        ranks, their inputs and inner values are of the rows that came here, and outputs and weights
        of those that went out. Of a frozen model less
        (`AdapterShape.unkept_values`); experts count in full, which is an upper bound.

        Of a recomputed layer it keeps `recomputed_bytes_per_token`. When backward reaches one, the
        layers after it are freed, so the rest of its activations need no room of their own as long
        as one layer at the end is not recomputed.
        """
        dense = max(0, self.parts.dense_layers - recomputed_layers)
        routed = self.layers - max(self.parts.dense_layers, recomputed_layers)
        of_dense, of_routed = (
            self._layer_bytes(is_carried=is_carried, is_dense=is_dense)
            for is_dense in (True, False)
        )
        kept = dense * of_dense + routed * of_routed
        if recomputed_layers and self.parts.dense_layers:
            # The room of the last layer may be too small for one of the first.
            kept += max(0, of_dense - of_routed)
        if recomputed_layers:  # What a frozen layer does not keep is there while it runs again.
            kept += self._unkept_values * self.value_bytes
        return kept + recomputed_layers * self.recomputed_bytes_per_token

    @property
    def _unkept_values(self) -> int:
        """Values of a token that a layer need not keep since it is frozen; 0 if it trains."""
        if self.adapters is None:
            return 0
        mlp_size = 0 if self.experts else self.mlp_size
        return self.adapters.unkept_values(self.hidden, self.query_size, mlp_size)

    def _layer_bytes(self, *, is_carried: bool, is_dense: bool) -> int:
        """Of one layer; `is_dense` if it has an MLP in a model of experts."""
        parts = self.parts
        heads = 2 * self.query_size + (0 if is_carried else 2 * self.key_size)
        heads += self.query_size + self.key_size if self.is_head_normed else 0
        heads += parts.latent.kept if parts.latent else self.query_size
        in_all = parts.norms_kept * self.hidden + heads
        if is_dense:
            return (in_all + parts.dense_mlp_kept) * self.value_bytes
        values = in_all + self._mlp_values
        weights = (self.experts + 2 * self.experts_per_token) * self.wide_bytes
        routes = weights + self.experts_per_token * (ROUTE_BYTES + self.expert_index_bytes)
        if self.expert_ranks > 1:
            routes += self.expert_rows * ROUTE_BYTES
        if parts.is_router_wide and self.value_bytes < self.wide_bytes:
            routes += self.hidden * self.wide_bytes
        return values * self.value_bytes + routes

    @property
    def expert_rows(self) -> int:
        """The most rows that go through this rank's experts at once, for each of its tokens.

        With experts on several ranks: for each token of the rank that has most tokens.
        """
        if self.expert_ranks == 1:
            return self.experts_per_token
        own = min(self.experts_per_token, self.experts // self.expert_ranks)
        return min(ROWS_RATIO * self.experts_per_token, self.expert_ranks * own)

    @property
    def _computed_mlp_size(self) -> int:
        """Intermediate sizes of all rows that go through MLP or experts here, for each token."""
        if not self.experts:
            return self.mlp_size
        return self.mlp_size // self.experts_per_token * self.expert_rows

    @property
    def recomputed_bytes_per_token(self) -> int:
        """Bytes that a layer which runs forward again keeps of one token until backward reaches it.

        Its input, its attention's output and log-sum-exp; the engine's expert route stays too.
        """
        values = (self.hidden + self.query_size) * self.value_bytes
        return (
            values
            + self.query_heads * self.wide_bytes
            + self.experts_per_token * self.expert_index_bytes
        )

    def block_bytes(
        self, tokens: int, *, chunk: int, is_carried: bool, recomputed_layers: int = 0
    ) -> int:
        """The most bytes of a block's forward and backward, without carries.

        At each peak there are, besides what autograd keeps, tensors of the residual stream's size:
        the embedding's output, the gradient of the decoder's output and, in a block, whose backward
        starts from that output too, the output itself. Backward starts with everything kept. The
        peaks come one after another, so the largest counts:

        - the head: a chunk, the rows that entries continue and their gradients;
        - a module of the decoder: `inner_bytes_per_token`;
        - the last layer's attention: `attention_bytes_per_token`, in place of that layer's MLP;
        - the last layer's down projection: the gradients of its weights and of its input.

        During the last two, the gradient of a tied head is held until the embedding's is added.

        A draft head runs after that, on the decoder's output of all tokens: it is held until then,
        or offloaded if there are carries. What several ranks gather for it is held at every peak.
        """
        peaks = self.peaks(chunk, is_carried=is_carried, recomputed_layers=recomputed_layers)
        return most_bytes(peaks, tokens)

    def block_tokens(self, free_bytes: int, *, chunk: int, is_carried: bool) -> int:
        """Tokens of the longest block whose `block_bytes` fit; 0 if no block fits."""
        peaks = self.peaks(chunk, is_carried=is_carried)
        return max(0, min(peak.tokens_in(free_bytes) for peak in peaks))

    def peaks(
        self, chunk: int, *, is_carried: bool, recomputed_layers: int = 0
    ) -> tuple[Peak, ...]:
        """The peaks of `block_bytes`, for blocks of any length."""
        row = self.hidden * self.value_bytes
        held = 3 if is_carried or self.draft else 2
        kept = held * row + self.saved_bytes_per_token(
            is_carried=is_carried, recomputed_layers=recomputed_layers
        )
        is_frozen = self.adapters is not None
        head_grad = self.vocabulary * row if self.is_head_tied and not is_frozen else 0
        input_grad = self._computed_mlp_size * self.value_bytes
        width = self.mlp_size
        if self.experts:
            own = self.experts // self.expert_ranks
            width = self.mlp_size // self.experts_per_token * own
        peaks: tuple[Peak, ...] = (
            Peak(fixed_bytes=self.head_bytes(chunk=chunk), token_bytes=kept + 2 * row),
            Peak(fixed_bytes=head_grad, token_bytes=kept + self.inner_bytes_per_token),
            Peak(
                fixed_bytes=0 if is_frozen else head_grad + width * row,
                token_bytes=kept + input_grad,
            ),
            Peak(
                fixed_bytes=head_grad,
                # Backward has freed the last layer's MLP before it reaches its attention.
                token_bytes=kept
                - max(0, self._mlp_values) * self.value_bytes
                + self.attention_bytes_per_token(is_carried=is_carried),
            ),
        )
        if self.draft is None:
            return peaks
        peaks += self.draft.peaks(chunk=chunk, is_carried=is_carried)
        gathered = self.draft.gathered_bytes
        return tuple(replace(peak, fixed_bytes=peak.fixed_bytes + gathered) for peak in peaks)

    @property
    def _mlp_values(self) -> int:
        """Values kept of a token's MLP or experts, less what its frozen layer need not keep."""
        kept = self.parts.mlp_kept or (EXPERT_KEPT if self.experts else MLP_KEPT)
        values = kept * self._computed_mlp_size + self.parts.shared_mlp_kept
        values += (self.experts_per_token + self.expert_rows) * self.hidden
        return values - self._unkept_values

    def attention_bytes_per_token(self, *, is_carried: bool) -> int:
        """The most bytes that one token holds in attention's backward, beside what is kept.

        By the size of all queries: the gradient of the output, twice, that of the queries, and in
        the kernel those of queries, keys and values, the latter for each query head, and one more;
        less the copy of the output, which the projection has freed. Two of them are wide. This is
        of a tree without branches, whose queries are one piece; with branches it is less. Gradients
        of keys and values are wide, and in blocks those of the carry.
        """
        queries = self.query_size * (4 * self.value_bytes + 2 * self.wide_bytes)
        keys = 0 if is_carried else 2 * self.key_size * self.wide_bytes
        return queries + keys + 2 * self.query_heads * self.wide_bytes

    @property
    def inner_bytes_per_token(self) -> int:
        """The most bytes that one token holds inside a module of the decoder, mostly in backward.

        - The last norm: its incoming gradient and two wide tensors; in a narrow dtype also the
          widened gradient and the result.
        - The last layer's MLP: the gradients of its activation and of up.
        - Experts: for each chosen one the gradient of its output in the order of the tokens and in
          the order of the experts, and the product of that gradient with the output. All are wide,
          as the routing weights are; in a narrow dtype the gradient is there once more, rounded.
        - Experts on several ranks: already in forward, for each row that came here, the row, its
          output, that times its weight of 1, and the same in the order in which rows came.
        """
        is_narrow = self.value_bytes < self.wide_bytes
        norm = self.value_bytes + 2 * self.wide_bytes
        norm += self.wide_bytes + self.value_bytes if is_narrow else 0
        rounded = self.value_bytes if is_narrow else 0
        experts = self.experts_per_token * (3 * self.wide_bytes + rounded)
        if self.expert_ranks > 1:
            experts = max(experts, self.expert_rows * 4 * self.value_bytes)
        # The gradient of the input, from the MLP that every token uses, waits for the experts'.
        experts += self.value_bytes if self.parts.shared_mlp_size else 0
        return max(self.hidden * max(norm, experts), 2 * self._computed_mlp_size * self.value_bytes)

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

    @property
    def traded_size(self) -> int:
        """Values of a token's keys in one layer that ranks of a team hand over, at most."""
        return max(self.key_size, self.draft.key_size if self.draft else 0)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Groups that run side by side, and the blocks of their joint layout.

    Attributes:
        groups: Indices into the step's forests, ascending.
        blocks: (start, end) over the joint layout, in order; one block if everything fits.
        is_offloaded: True if keys and values off the live path go to the policy's offload store.
        recomputed_layers: So many of the first layers run forward again in backward; 0 in blocks.
        predicted_bytes: The most that it holds at once, without parameters and their gradients.
    """

    groups: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    is_offloaded: bool = False
    recomputed_layers: int = 0
    predicted_bytes: int = 0


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
