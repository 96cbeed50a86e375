"""Gradients of a draft head over the forest of one microbatch.

The head guesses what follows a token c from c itself and from the policy's state before it: its row
of c reads concat[embedding of c; final hidden state of c's parent], runs one decoder layer in which
a row sees the rows of c's ancestors, and its final state goes through the policy's language-model
head. The policy's own distribution after c is what the row should have given. Everything that the
policy computed enters as a constant, so no gradient reaches the policy.

So a head is one more layer under the ancestor mask, over a forest in which every root is alone: a
root has no state before it, hence no row, and none sees it. A token that several samples share has
one row, as it has in an engine whose cache they share.

On later depths, a row reads the head's own final state of the parent in place of the policy's, as
an engine does when it drafts several tokens in a row. These states enter as constants too, so the
depths train one after another. Here all rows of a depth read such states; in the engine the rows
before the drafted ones read the policy's.

N tokens, T tokens of a run, M segments, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from forgemq_trainer.core.attention.attention import AttentionBackend, BlockKeys, TreeAttention
from forgemq_trainer.core.attention.carry import KeyShape, MakeStore, PathKeys
from forgemq_trainer.core.attention.plan import attention_plan, pieces
from forgemq_trainer.core.draft_loss import DraftTotals, draft_loss
from forgemq_trainer.core.draft_memory import DraftShape
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.tree import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A draft head in training, and what it uses of the policy.

    Attributes:
        layer: Takes embeddings, states, positions and `tree_attention`; returns states.
        embedding_VH: The policy's embedding.
        head_VH: Weights of the policy's language-model head.
        shape: The head's sizes.
        key_heads: Number of key/value heads.
        attention: Makes the attention of a run of queries on the model's device.
        make_store: Allocates room outside the memory budget.
        top_k: Tokens that the loss compares one by one.
        depths: How many tokens in a row the head learns to guess.
    """

    layer: nn.Module
    embedding_VH: Tensor
    head_VH: Tensor
    shape: DraftShape
    key_heads: int
    attention: AttentionBackend
    make_store: MakeStore
    top_k: int
    depths: int = 1

    @property
    def key_shape(self) -> KeyShape:
        """Of the layer's keys and values."""
        return KeyShape(
            layers=1,
            heads=self.key_heads,
            head_size=self.shape.key_size // self.key_heads,
            dtype=self.head_VH.dtype,
            device=self.head_VH.device,
            slot_multiple=self.attention.slot_multiple,
        )


class KeptStates:
    """Final hidden states of all tokens of a microbatch, without gradient.

    Those of a microbatch that runs whole stay where they are. Those of blocks lie in a store
    outside the memory budget: `keep` is called once for each block.
    """

    def __init__(self, store_NH: Tensor | None = None) -> None:
        self._store_NH = store_NH
        self.states_NH: Tensor | None = store_NH
        """None until a forward ran."""

    def keep(self, start: int, end: int, state_TH: Tensor) -> None:
        """Keep the states of the tokens [start, end)."""
        if self._store_NH is None:
            self.states_NH = state_TH.detach()
        elif not state_TH.requires_grad:  # Blocks run twice; the second time they are the same.
            self._store_NH[start:end].copy_(state_TH)


def row_count(forest: Forest, depth: int) -> int:
    """Rows that train at a depth from 0: tokens with more ancestors than that."""
    return int((forest.position_N > depth).sum())


def with_lone_roots(forest: Forest) -> Forest:
    """The same layout with every root as a tree of its own; each child of a root begins a tree.

    Positions are those of an engine's draft: one less than the token's. Only fields that decide
    attention differ; entries are the forest's own.
    """
    is_root_M = forest.segment_parent_M < 0
    start_M, end_M = forest.segment_start_M, forest.segment_end_M
    roots = start_M[is_root_M]
    is_cut_M = is_root_M & (end_M - start_M > 1)
    # Every cut moves the segments after it by one; a cut segment's index is that of its rest.
    index_M = np.arange(len(start_M)) + np.cumsum(is_cut_M)
    parent_M = np.where(is_root_M, -1, index_M[forest.segment_parent_M])
    parent_M[~is_root_M & (is_root_M & ~is_cut_M)[forest.segment_parent_M]] = -1
    cut = start_M[is_cut_M]
    starts = np.concatenate([start_M + is_cut_M, cut])
    order = np.argsort(starts)
    subtree_end_N = forest.subtree_end_N.copy()
    subtree_end_N[roots] = roots + 1
    return replace(
        forest,
        parent_N=np.where(np.isin(forest.parent_N, roots), -1, forest.parent_N),
        position_N=np.maximum(forest.position_N - 1, 0),
        subtree_end_N=subtree_end_N,
        segment_start_M=starts[order],
        segment_end_M=np.concatenate([end_M, cut + 1])[order],
        segment_parent_M=np.concatenate([parent_M, np.full(len(cut), -1)])[order],
    )


class Drafting:
    """A head's part of one optimizer step; collects the sums of its rows.

    The loss is loss_weight times the mean over the step's rows, of each depth. What it is divided
    by is fixed before any backward, so microbatches and blocks add up to the same gradient.
    """

    def __init__(self, model: DraftModel, forests: Sequence[Forest], *, loss_weight: float) -> None:
        """Take the step's forests; `loss_weight` is that of a row's mean loss."""
        self._model = model
        self._row_weight_D = [
            loss_weight / max(1, sum(row_count(forest, depth) for forest in forests))
            for depth in range(model.depths)
        ]
        self.totals = [DraftTotals() for _ in range(model.depths)]
        """Of the microbatches so far, by depth."""

    def room(self, forest: Forest, microbatch: Microbatch) -> KeptStates:
        """Room for the states of a microbatch's forest."""
        return self._room(forest.token_count, len(microbatch.blocks))

    def add_gradients(
        self, forest: Forest, states: KeptStates, microbatch: Microbatch, *, head_chunk: int
    ) -> None:
        """Add the gradients of the rows of a microbatch, whose forward has kept its states.

        Args:
            forest: Of the microbatch.
            states: The policy's, of all its tokens; empty if it has no entries and did not run.
            microbatch: Its blocks are the head's too.
            head_chunk: Rows of logits that exist at once.
        """
        teacher_NH = states.states_NH
        if teacher_NH is None:
            return
        before_NH = teacher_NH
        for depth, row_weight in enumerate(self._row_weight_D):
            one = _Depth(self._model, forest, before_NH, teacher_NH, depth=depth)
            is_last = depth + 1 == self._model.depths
            own = None if is_last else self._room(forest.token_count, len(microbatch.blocks))
            weights = _Weights(row_weight, head_chunk)
            self.totals[depth] += (
                one.run_whole(own, weights)
                if len(microbatch.blocks) == 1
                else one.run_in_blocks(microbatch, own, weights)
            )
            if own is None:
                return
            assert own.states_NH is not None
            before_NH = own.states_NH
            # The head has no state of a root: the second token always reads the policy's.
            roots = torch.from_numpy(np.flatnonzero(forest.parent_N < 0)).to(before_NH.device)
            before_NH[roots] = teacher_NH[roots]

    def _room(self, tokens: int, blocks: int) -> KeptStates:
        if blocks == 1:
            return KeptStates()
        size = (tokens, self._model.shape.hidden)
        return KeptStates(self._model.make_store(size, self._model.head_VH.dtype))


@dataclass(frozen=True, slots=True)
class _Weights:
    of_row: float
    head_chunk: int


class _Depth:
    """The head over one forest, its rows reading one set of states."""

    def __init__(
        self,
        model: DraftModel,
        forest: Forest,
        before_NH: Tensor,
        teacher_NH: Tensor,
        *,
        depth: int,
    ) -> None:
        self._model, self._device = model, model.head_VH.device
        self._before_NH, self._teacher_NH = before_NH, teacher_NH
        self._tokens_N = torch.from_numpy(forest.tokens_N).to(self._device)
        # A root reads its own state: any finite one would do, as nothing sees its row.
        parent_N = np.where(forest.parent_N < 0, np.arange(forest.token_count), forest.parent_N)
        self._parent_N = torch.from_numpy(parent_N).to(before_NH.device)
        # At depth d the state before comes from d tokens that were guessed after a true one.
        self._is_row_N = torch.from_numpy(forest.position_N > depth).to(self._device)
        self._rows = with_lone_roots(forest)
        self._pieces = pieces(self._rows)
        self._position_N = torch.from_numpy(self._rows.position_N).to(self._device)

    def run_whole(self, own: KeptStates | None, weights: _Weights) -> DraftTotals:
        """Run all tokens forward and backward at once."""
        count = self._rows.token_count
        keys = BlockKeys(
            plan=attention_plan(self._pieces, start=0, end=count),
            carries=(),
            subtree_end_S=self._rows.subtree_end_N,
            position_S=self._rows.position_N,
        )
        state_NH = self._states(0, count, keys)
        if own is not None:
            own.keep(0, count, state_NH)
        return self._backward(0, count, state_NH, weights)

    def run_in_blocks(
        self, microbatch: Microbatch, own: KeptStates | None, weights: _Weights
    ) -> DraftTotals:
        """Run block by block: the same gradients, in the memory of one block and the carries."""
        keys = PathKeys(
            self._rows,
            self._pieces,
            microbatch.blocks,
            shape=self._model.key_shape,
            make_store=self._model.make_store if microbatch.is_offloaded else None,
        )
        for number, (start, end) in enumerate(microbatch.blocks):
            with torch.no_grad():
                state_TH = self._states(start, end, keys.enter(number))
                if own is not None:
                    own.keep(start, end, state_TH)
        keys.start_backward()
        totals = DraftTotals()
        for number, (start, end) in reversed(list(enumerate(microbatch.blocks))):
            state_TH = self._states(start, end, keys.enter(number))
            totals += self._backward(start, end, state_TH, weights)
        return totals

    def _states(self, start: int, end: int, keys: BlockKeys) -> Tensor:
        """The head's final states of the tokens [start, end)."""
        attend = self._model.attention.of_run(
            keys, dtype=self._model.head_VH.dtype, device=self._device
        )
        before_TH = self._before_NH.index_select(0, self._parent_N[start:end])
        embedded_TH = nn.functional.embedding(
            self._tokens_N[start:end], self._model.embedding_VH.detach()
        )
        state_TH = self._model.layer(
            embedded_TH,
            before_TH.to(self._device),
            self._position_N[start:end],
            tree_attention=TreeAttention(attend=attend, carries=keys.carries),
        )
        assert isinstance(state_TH, Tensor)
        return state_TH

    def _backward(self, start: int, end: int, state_TH: Tensor, weights: _Weights) -> DraftTotals:
        totals, grad_TH = draft_loss(
            state_TH.detach(),
            self._teacher_NH[start:end],
            self._model.head_VH.detach(),
            is_row_T=self._is_row_N[start:end],
            top_k=self._model.top_k,
            chunk=weights.head_chunk,
        )
        state_TH.backward(grad_TH.mul_(weights.of_row))  # type: ignore[no-untyped-call]
        return totals
