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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from forgemq_trainer.core.attention.attention import AttentionBackend, BlockKeys, TreeAttention
from forgemq_trainer.core.attention.carry import KeyShape, LayoutRun, MakeStore, PathKeys
from forgemq_trainer.core.attention.exchange import KeyExchange
from forgemq_trainer.core.attention.plan import attention_plan, pieces
from forgemq_trainer.core.draft_loss import DraftTotals, draft_loss
from forgemq_trainer.core.draft_memory import DraftShape
from forgemq_trainer.core.kept_states import KeptStates
from forgemq_trainer.core.tree import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEnds:
    """Weights of the policy that a draft head uses, whole and without gradient.

    Attributes:
        embedding_VH: Its embedding.
        head_VH: Its language-model head; may be the same tensor.
    """

    embedding_VH: Tensor
    head_VH: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A draft head in training, and what it uses of the policy.

    Attributes:
        layer: Takes embeddings, states, positions, `tree_attention` and `key_exchange`; returns
            states.
        policy_ends: Returns the policy's; every rank calls it at once if they share the parameters.
        dtype: Of its values.
        device: That computes it.
        shape: The head's sizes.
        key_heads: Number of key/value heads.
        attention: Makes the attention of a run of queries on the model's device.
        make_store: Allocates room outside the memory budget.
        top_k: Tokens that the loss compares one by one.
        depths: How many tokens in a row the head learns to guess.
    """

    layer: nn.Module
    policy_ends: Callable[[], PolicyEnds]
    dtype: torch.dtype
    device: torch.device
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
            dtype=self.dtype,
            device=self.device,
            slot_multiple=self.attention.slot_multiple,
        )


def row_count(forest: Forest, depth: int) -> int:
    """Rows that train at a depth from 0: tokens with more ancestors than that.

    A forest without entries has none: the policy does not run it.
    """
    return int((forest.position_N > depth).sum()) if forest.entry_count else 0


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
    by is fixed before any backward, so microbatches, blocks and ranks add up to the same gradient.
    """

    def __init__(self, model: DraftModel, forests: Sequence[Forest], *, loss_weight: float) -> None:
        """Take the step's forests; `loss_weight` is that of a row's mean loss.

        If ranks share the policy's parameters, every rank calls it, with the forests of all.
        """
        self._model = model
        self._ends = model.policy_ends()
        self._row_weight_D = [
            loss_weight / max(1, sum(row_count(forest, depth) for forest in forests))
            for depth in range(model.depths)
        ]
        self.totals = [DraftTotals() for _ in range(model.depths)]
        """Of what this process has run so far, by depth."""

    def room(self, forest: Forest, run: LayoutRun) -> KeptStates:
        """Room for the states of a layout's forest."""
        return KeptStates(
            forest,
            run,
            hidden=self._model.shape.hidden,
            dtype=self._model.dtype,
            make_store=self._model.make_store,
        )

    def add_gradients(
        self, forest: Forest, states: KeptStates, run: LayoutRun, *, head_chunk: int
    ) -> None:
        """Add the gradients of the rows of a layout, whose forward has kept its states.

        Args:
            forest: Of the layout.
            states: The policy's; empty if the layout has no entries and did not run.
            run: As the policy ran; every rank of a team makes the same call.
            head_chunk: Rows of logits that exist at once.
        """
        if states.is_empty:
            return
        states.share(self._model.device)
        before = states
        for depth, row_weight in enumerate(self._row_weight_D):
            one = _Depth(self._model, self._ends, forest, before, states, depth=depth)
            is_last = depth + 1 == self._model.depths
            own = None if is_last else self.room(forest, run)
            weights = _Weights(row_weight, head_chunk)
            self.totals[depth] += (
                one.run_whole(own, weights)
                if run.is_whole
                else one.run_in_blocks(run, own, weights)
            )
            if own is None:
                return
            # The head has no state of a root: the second token always reads the policy's.
            own.take_roots(states)
            own.share(self._model.device)
            before = own


@dataclass(frozen=True, slots=True)
class _Weights:
    of_row: float
    head_chunk: int


class _Depth:
    """The head over one forest, its rows reading one set of states."""

    def __init__(
        self,
        model: DraftModel,
        ends: PolicyEnds,
        forest: Forest,
        before: KeptStates,
        teacher: KeptStates,
        *,
        depth: int,
    ) -> None:
        self._model, self._ends, self._device = model, ends, model.device
        self._before, self._teacher = before, teacher
        self._tokens_N = torch.from_numpy(forest.tokens_N).to(self._device)
        # A root reads its own state: any finite one would do, as nothing sees its row.
        self._parent_N = np.where(
            forest.parent_N < 0, np.arange(forest.token_count), forest.parent_N
        )
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
        self, run: LayoutRun, own: KeptStates | None, weights: _Weights
    ) -> DraftTotals:
        """Run block by block: the same gradients, in the memory of one block and the carries.

        A team that runs one block runs it forward once.
        """
        keys = PathKeys(
            self._rows,
            self._pieces,
            run.blocks,
            shape=self._model.key_shape,
            make_store=self._model.make_store if run.is_offloaded else None,
            team=run.team,
        )
        if len(run.blocks) > 1:
            for number, (start, end) in enumerate(run.blocks):
                with torch.no_grad():
                    self._block_states(number, start, end, keys, own)
            keys.start_backward()
        totals = DraftTotals()
        for number, (start, end) in reversed(list(enumerate(run.blocks))):
            state_TH = self._block_states(number, start, end, keys, own)
            totals += self._backward(start, end, state_TH, weights)
        return totals

    def _block_states(
        self, number: int, start: int, end: int, keys: PathKeys, own: KeptStates | None
    ) -> Tensor:
        """The head's final states of a block, or of this rank's range of it; keeps them."""
        live = keys.enter(number)
        state_TH = self._states(start, end, live, exchange=keys.exchange(number))
        if own is not None:
            own.keep(start, end, state_TH)
        return state_TH

    def _states(
        self, start: int, end: int, keys: BlockKeys, *, exchange: KeyExchange | None = None
    ) -> Tensor:
        """The head's final states of the tokens [start, end)."""
        attend = self._model.attention.of_run(keys, dtype=self._model.dtype, device=self._device)
        before_TH = self._before.of(self._parent_N[start:end])
        embedded_TH = nn.functional.embedding(self._tokens_N[start:end], self._ends.embedding_VH)
        state_TH = self._model.layer(
            embedded_TH,
            before_TH.to(self._device),
            self._position_N[start:end],
            tree_attention=TreeAttention(attend=attend, carries=keys.carries),
            key_exchange=exchange,
        )
        assert isinstance(state_TH, Tensor)
        return state_TH

    def _backward(self, start: int, end: int, state_TH: Tensor, weights: _Weights) -> DraftTotals:
        totals, grad_TH = draft_loss(
            state_TH.detach(),
            self._teacher.of_block(start, end),
            self._ends.head_VH,
            is_row_T=self._is_row_N[start:end],
            top_k=self._model.top_k,
            chunk=weights.head_chunk,
        )
        state_TH.backward(grad_TH.mul_(weights.of_row))  # type: ignore[no-untyped-call]
        return totals
