"""The model over a prefix tree: hidden states and log-probabilities, whole or block by block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forgemq_trainer.core.assignment import Range
from forgemq_trainer.core.attention.attention import (
    AttentionBackend,
    BlockKeys,
    Carry,
    TreeAttention,
)
from forgemq_trainer.core.attention.carry import (
    CarriedKeys,
    MakeStore,
    PathKeys,
    WholeKeys,
    empty_carry,
)
from forgemq_trainer.core.attention.exchange import KeyExchange
from forgemq_trainer.core.attention.plan import attention_plan, pieces
from forgemq_trainer.core.logprobs import Edges, edge_logprobs, edges_of
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.precision import TopKRouter
from forgemq_trainer.core.routes import token_routes
from forgemq_trainer.core.tree import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model in training, as a step needs it.

    Attributes:
        decoder: the model without its head; takes tokens, positions and `tree_attention`.
        head_VH: weights of the head, perhaps tied to the embedding; says dtype and device.
        shape: its sizes.
        key_heads: key/value heads.
        attention: makes the attention of a run of queries on the model's device.
        routers: of the layers that have one, in order.
        make_store: where keys and values go that a budget has no room for; None: nowhere.
        gather_head: where ranks share the parameters, `head_VH` is empty and this makes it whole.
    """

    decoder: nn.Module
    head_VH: Tensor
    shape: ModelShape
    key_heads: int
    attention: AttentionBackend
    routers: tuple[TopKRouter, ...] = ()
    make_store: MakeStore | None = None
    gather_head: Callable[[], Tensor] | None = None


class TreeForward:
    """Forward passes over the forest of one microbatch; made for it and dropped after it."""

    def __init__(self, policy: Policy, forest: Forest, *, head_chunk: int) -> None:
        self._policy = policy
        self._forest = forest
        self._pieces = pieces(forest)
        self._head_chunk = head_chunk
        self._device = policy.head_VH.device
        self._wide = torch.promote_types(policy.head_VH.dtype, torch.float32)
        self._tokens_N = torch.from_numpy(forest.tokens_N).to(self._device)
        self._position_N = torch.from_numpy(forest.position_N).to(self._device)
        self._routes = None
        if policy.routers:
            top_k = policy.routers[0].top_k
            self._routes = token_routes(forest, layers=len(policy.routers), top_k=top_k)

    def edges(self, start: int, end: int) -> Edges:
        """Those that leave the tokens [start, end), on the model's device."""
        return edges_of(self._forest, start=start, end=end).to(self._device)

    def whole(self) -> tuple[Tensor, Tensor]:
        """All tokens at once, with gradient.

        Returns:
            Log-probability and entropy of every entry, [E] each, in at least fp32; the entropy has
            no gradient.
        """
        count = self._forest.token_count
        logprob_E, entropy_E = self._zeros(), self._zeros()
        edges = self.edges(0, count)
        if len(edges.entry_E) == 0:
            return logprob_E, entropy_E
        keys = BlockKeys(
            plan=attention_plan(self._pieces, start=0, end=count),
            carries=(),
            subtree_end_S=self._forest.subtree_end_N,
        )
        logprob_J, entropy_R = self.logprobs(self.hidden(0, count, keys=keys), edges, start=0)
        logprob_E = logprob_E.index_copy(0, edges.entry_E, logprob_J[edges.edge_of_entry_E])
        entropy_E[edges.entry_E] = entropy_R[edges.row_J[edges.edge_of_entry_E]]
        return logprob_E, entropy_E

    @torch.no_grad()
    def read(
        self,
        blocks: Sequence[Range],
        all_edges: Sequence[Edges],
        keys: CarriedKeys,
        exchanges: Sequence[KeyExchange] = (),
    ) -> tuple[Tensor, Tensor]:
        """Block by block, without gradient; as `whole`.

        With an exchange for each block, `blocks` are this rank's ranges of them.
        """
        between: Sequence[KeyExchange | None] = exchanges or [None] * len(blocks)
        logprob_E, entropy_E = self._zeros(), self._zeros()
        for number, (start, end) in enumerate(blocks):
            edges = all_edges[number]
            hidden = self.hidden(start, end, keys=keys.enter(number), exchange=between[number])
            logprob_J, entropy_R = self.logprobs(hidden, edges, start=start)
            logprob_E[edges.entry_E] = logprob_J[edges.edge_of_entry_E]
            entropy_E[edges.entry_E] = entropy_R[edges.row_J[edges.edge_of_entry_E]]
        if exchanges:  # Each entry was read on one rank and is 0 on the others.
            logprob_E = exchanges[0].peers.total(logprob_E)
            entropy_E = exchanges[0].peers.total(entropy_E)
        return logprob_E, entropy_E

    def hidden(
        self,
        start: int,
        end: int,
        *,
        keys: BlockKeys,
        exchange: KeyExchange | None = None,
    ) -> Tensor:
        """Final hidden states of the tokens [start, end)."""
        attend = self._policy.attention.of_run(
            keys, dtype=self._policy.head_VH.dtype, device=self._device
        )
        self._replay(start, end)
        output = self._policy.decoder(
            input_ids=self._tokens_N[None, start:end],
            position_ids=self._position_N[None, start:end],
            use_cache=False,
            tree_attention=TreeAttention(attend=attend, carries=keys.carries),
            key_exchange=exchange,
        )
        hidden_TH = output.last_hidden_state[0]
        assert isinstance(hidden_TH, Tensor)
        return hidden_TH

    def logprobs(self, hidden: Tensor, edges: Edges, *, start: int) -> tuple[Tensor, Tensor]:
        """Of the edges and of their rows, from the hidden states of the tokens from `start` on."""
        rows = hidden.index_select(0, edges.source_R - start)
        gather = self._policy.gather_head
        head_VH = self._policy.head_VH if gather is None else gather()
        return edge_logprobs(rows, head_VH, edges, chunk=self._head_chunk)

    def path_keys(self, blocks: Sequence[Range], *, is_offloaded: bool) -> PathKeys:
        """Carries of the live path, for blocks that this process runs by itself."""
        shape, heads = self._policy.shape, self._policy.key_heads
        return PathKeys(
            self._forest,
            self._pieces,
            blocks,
            layers=shape.layers,
            key_heads=heads,
            head_size=shape.key_size // heads,
            dtype=self._policy.head_VH.dtype,
            device=self._device,
            slot_multiple=self._policy.attention.slot_multiple,
            make_store=self._policy.make_store if is_offloaded else None,
        )

    def whole_keys(self, blocks: Sequence[Range]) -> WholeKeys:
        """Carries of all tokens, for ranks that run the forest together."""
        return WholeKeys(self._forest, self._pieces, blocks, carries=self._carries())

    def _replay(self, start: int, end: int) -> None:
        expert_TLK = None
        if self._routes is not None:
            expert_TLK = torch.from_numpy(self._routes.expert_NLK[start:end]).to(self._device)
        for layer, router in enumerate(self._policy.routers):
            router.replayed_TK = None if expert_TLK is None else expert_TLK[:, layer]

    def _carries(self) -> tuple[Carry, ...]:
        shape, heads = self._policy.shape, self._policy.key_heads
        multiple = self._policy.attention.slot_multiple
        return tuple(
            empty_carry(
                -(-self._forest.token_count // multiple) * multiple,
                key_heads=heads,
                head_size=shape.key_size // heads,
                dtype=self._policy.head_VH.dtype,
                device=self._device,
            )
            for _ in range(shape.layers)
        )

    def _zeros(self) -> Tensor:
        return torch.zeros(self._forest.entry_count, dtype=self._wide, device=self._device)
