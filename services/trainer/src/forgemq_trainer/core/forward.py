"""The model over a prefix tree: hidden states and log-probabilities, whole or block by block.

N tokens, T tokens of a run, H hidden size, V vocabulary, E entries, J edges, R rows, L layers with
a router, K experts for each token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forgemq_trainer.core.attention.attention import (
    AttentionBackend,
    BlockKeys,
    KeptOutput,
    TreeAttention,
)
from forgemq_trainer.core.attention.carry import (
    KeyShape,
    MakeStore,
    PathKeys,
    TeamBlocks,
)
from forgemq_trainer.core.attention.exchange import KeyExchange, Peers
from forgemq_trainer.core.attention.plan import Range, attention_plan, pieces
from forgemq_trainer.core.expert_routes import token_expert_routes
from forgemq_trainer.core.kept_states import KeptStates
from forgemq_trainer.core.logprobs import Edges, edge_logprobs, edges_of
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.recomputation import LayerCall
from forgemq_trainer.core.routers import ExpertRouter
from forgemq_trainer.core.tree import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModel:
    """The model in training, as a step needs it.

    Attributes:
        decoder: The model without its head; takes tokens, positions and `tree_attention`.
        head_VH: Weights of the head, perhaps tied to the embedding; decides dtype and device.
        shape: Its sizes.
        key_heads: Number of key/value heads.
        attention: Makes the attention of a run of queries on the model's device.
        layer_calls: In layer order; decide which layers are recomputed in backward.
        routers: In layer order; empty for a dense model.
        make_store: Allocates room for keys and values that exceed the memory budget; None keeps
            them on the device.
        gather_head: Returns the whole head if ranks share the parameters, for `head_VH` is then
            empty; None if `head_VH` is whole.
    """

    decoder: nn.Module
    head_VH: Tensor
    shape: ModelShape
    key_heads: int
    attention: AttentionBackend
    layer_calls: tuple[LayerCall, ...]
    routers: tuple[ExpertRouter, ...] = ()
    make_store: MakeStore | None = None
    gather_head: Callable[[], Tensor] | None = None

    @property
    def key_shape(self) -> KeyShape:
        """Of its keys and values."""
        return KeyShape(
            layers=self.shape.layers,
            heads=self.key_heads,
            head_size=self.shape.key_size // self.key_heads,
            dtype=self.head_VH.dtype,
            device=self.head_VH.device,
            slot_multiple=self.attention.slot_multiple,
        )


class TreeForward:
    """Forward passes over the forest of one microbatch; lives as long as the microbatch."""

    def __init__(
        self,
        policy: PolicyModel,
        forest: Forest,
        *,
        head_chunk: int,
        states: KeptStates | None = None,
    ) -> None:
        """Run nothing yet; `states` keeps the final hidden states of a training pass."""
        self._policy = policy
        self._kept = states
        self._forest = forest
        self._pieces = pieces(forest)
        self._head_chunk = head_chunk
        self._device = policy.head_VH.device
        self._wide = torch.promote_types(policy.head_VH.dtype, torch.float32)
        self._tokens_N = torch.from_numpy(forest.tokens_N).to(self._device)
        self._position_N = torch.from_numpy(forest.position_N).to(self._device)
        self._expert_routes = token_expert_routes(forest, policy.shape) if policy.routers else None

    @property
    def route_disagreements(self) -> int:
        """Entries whose recorded experts are not those that the token they continue runs."""
        return self._expert_routes.disagreements if self._expert_routes else 0

    def edges(self, start: int, end: int) -> Edges:
        """The edges that leave the tokens [start, end), on the model's device."""
        return edges_of(self._forest, start=start, end=end).to(self._device)

    def whole(self, *, recomputed_layers: int = 0) -> tuple[Tensor, Tensor]:
        """Run all tokens at once, with gradient.

        Args:
            recomputed_layers: So many of the first layers run forward again in backward.

        Returns:
            Log-probability and entropy of every entry, [E] each, in at least fp32; the entropy has
            no gradient.
        """
        count = self._forest.token_count
        logprob_E, entropy_E = self._zeros(), self._zeros()
        edges = self.edges(0, count)
        # Nothing to learn from: no forward is needed.
        if len(edges.entry_E) == 0:
            return logprob_E, entropy_E
        keys = BlockKeys(
            plan=attention_plan(self._pieces, start=0, end=count),
            carries=(),
            subtree_end_S=self._forest.subtree_end_N,
            position_S=self._forest.position_N,
        )
        hidden = self.hidden(0, count, keys=keys, recomputed_layers=recomputed_layers)
        logprob_J, entropy_R = self.logprobs(hidden, edges, start=0)
        logprob_E = logprob_E.index_copy(0, edges.entry_E, logprob_J[edges.edge_of_entry_E])
        entropy_E[edges.entry_E] = entropy_R[edges.row_J[edges.edge_of_entry_E]]
        return logprob_E, entropy_E

    @torch.no_grad()
    def read(
        self,
        blocks: Sequence[Range],
        all_edges: Sequence[Edges],
        keys: PathKeys,
        peers: Peers | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run block by block, without gradient; returns what `whole` does.

        Args:
            blocks: Of a team, this rank's ranges of them.
            all_edges: Those that leave each block.
            keys: The carries of these blocks.
            peers: The team; None if this process runs the forest alone.
        """
        logprob_E, entropy_E = self._zeros(), self._zeros()
        for number, (start, end) in enumerate(blocks):
            edges = all_edges[number]
            hidden = self.block_hidden(number, start, end, keys=keys)
            logprob_J, entropy_R = self.logprobs(hidden, edges, start=start)
            logprob_E[edges.entry_E] = logprob_J[edges.edge_of_entry_E]
            entropy_E[edges.entry_E] = entropy_R[edges.row_J[edges.edge_of_entry_E]]
        return _of_all(logprob_E, entropy_E, peers)

    def together(
        self, own: Range, edges: Edges, keys: PathKeys, peers: Peers
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run this rank's range of a layout in one block, with gradient.

        Returns:
            The range's final hidden states and the log-probabilities of its edges, with gradient;
            and the log-probability and entropy of every entry of the layout, without.
        """
        hidden = self.block_hidden(0, *own, keys=keys)
        logprob_J, entropy_R = self.logprobs(hidden, edges, start=own[0])
        logprob_E, entropy_E = self._zeros(), self._zeros()
        logprob_E[edges.entry_E] = logprob_J.detach()[edges.edge_of_entry_E]
        entropy_E[edges.entry_E] = entropy_R[edges.row_J[edges.edge_of_entry_E]]
        return hidden, logprob_J, *_of_all(logprob_E, entropy_E, peers)

    def block_hidden(self, number: int, start: int, end: int, *, keys: PathKeys) -> Tensor:
        """Final hidden states of a block, or of this rank's range of it; its path becomes live."""
        live = keys.enter(number)
        return self.hidden(start, end, keys=live, exchange=keys.exchange(number))

    def hidden(
        self,
        start: int,
        end: int,
        *,
        keys: BlockKeys,
        exchange: KeyExchange | None = None,
        recomputed_layers: int = 0,
    ) -> Tensor:
        """Run the decoder over the tokens [start, end); returns their final hidden states."""
        attend = self._policy.attention.of_run(
            keys, dtype=self._policy.head_VH.dtype, device=self._device
        )
        self._set_expert_routes(start, end)
        for layer, call in enumerate(self._policy.layer_calls):
            call.is_recomputed = layer < recomputed_layers
        kept = tuple(KeptOutput() for _ in range(recomputed_layers))
        output = self._policy.decoder(
            input_ids=self._tokens_N[None, start:end],
            position_ids=self._position_N[None, start:end],
            use_cache=False,
            return_dict=True,  # A model's config.json may say otherwise.
            tree_attention=TreeAttention(attend=attend, carries=keys.carries, kept=kept),
            key_exchange=exchange,
        )
        hidden_TH = output.last_hidden_state[0]
        assert isinstance(hidden_TH, Tensor)
        if self._kept is not None:
            self._kept.keep(start, end, hidden_TH)
        return hidden_TH

    def logprobs(self, hidden: Tensor, edges: Edges, *, start: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the edges and entropies of their rows.

        Args:
            hidden: Final hidden states of a run of tokens.
            edges: That leave these tokens.
            start: Layout index of the first of them.
        """
        rows = hidden.index_select(0, edges.source_R - start)
        gather = self._policy.gather_head
        head_VH = self._policy.head_VH if gather is None else gather()
        return edge_logprobs(rows, head_VH, edges, chunk=self._head_chunk)

    def path_keys(
        self, blocks: Sequence[Range], *, is_offloaded: bool, team: TeamBlocks | None = None
    ) -> PathKeys:
        """Carries of the live path; of a team, `blocks` are this rank's ranges."""
        return PathKeys(
            self._forest,
            self._pieces,
            blocks,
            shape=self._policy.key_shape,
            make_store=self._policy.make_store if is_offloaded else None,
            team=team,
        )

    def _set_expert_routes(self, start: int, end: int) -> None:
        """Give each router the recorded experts of the tokens [start, end), or None."""
        expert_TLK = None
        if self._expert_routes is not None:
            run_NLK = self._expert_routes.expert_NLK[start:end]
            expert_TLK = torch.from_numpy(run_NLK).to(self._device)
        for layer, router in enumerate(self._policy.routers):
            router.recorded_TK = None if expert_TLK is None else expert_TLK[:, layer]

    def _zeros(self) -> Tensor:
        return torch.zeros(self._forest.entry_count, dtype=self._wide, device=self._device)


def _of_all(logprob_E: Tensor, entropy_E: Tensor, peers: Peers | None) -> tuple[Tensor, Tensor]:
    """Both of every entry: each was read on one rank and is 0 on the others."""
    if peers is None:
        return logprob_E, entropy_E
    return peers.all_reduce(logprob_E), peers.all_reduce(entropy_E)
