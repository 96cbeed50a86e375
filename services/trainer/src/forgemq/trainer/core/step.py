"""Forward and backward of one optimizer step over its trees.

The denominator of every group is fixed before any backward. A microbatch that fits is one forward
and one backward. One that runs in blocks takes two passes: first every block forward without
gradient, which gives all log-probabilities, hence the loss and what it owes to each of them; then
every block again in reverse order, forward and backward, with the gradients of keys and values
carried from later blocks to earlier ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from forgemq.contracts.run import Loss
from forgemq.trainer.core.assignment import Range
from forgemq.trainer.core.attention import AttentionBackend, BlockKeys, Carry, TreeAttention
from forgemq.trainer.core.carry import CarriedKeys, MakeStore, PathKeys, WholeKeys, empty_carry
from forgemq.trainer.core.exchange import KeyExchange, Peers
from forgemq.trainer.core.logprobs import Edges, edge_logprobs, edges_of
from forgemq.trainer.core.loss import Entries, EntryLoss, LossFunction, loss_function
from forgemq.trainer.core.memory import Microbatch, ModelShape
from forgemq.trainer.core.plan import attention_plan, pieces
from forgemq.trainer.core.precision import TopKRouter
from forgemq.trainer.core.routes import token_routes
from forgemq.trainer.core.tree import Floats, Forest, Integers, joined


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryValues:
    """What a step found for every loss entry, float64 and bool arrays of E values.

    Attributes:
        logprob_E: the policy's, at the sampling temperature, before this step.
        behaviour_E: as recorded.
        loss_E: before the denominator.
        is_limited_E: a cap, clip or mask took hold.
        entropy_E: of the policy where the entry was sampled.
        version_E: weight version that sampled it.
        reference_E: log-probability under the reference, NaN where there is none.
        loss: sum of the weighted losses.
    """

    logprob_E: Floats
    behaviour_E: Floats
    loss_E: Floats
    is_limited_E: np.ndarray[tuple[int], np.dtype[np.bool_]]
    entropy_E: Floats
    version_E: Integers
    reference_E: Floats
    loss: float


def group_weights(
    forests: Sequence[Forest], *, normalisation: Literal["step", "group"]
) -> list[float]:
    """What each entry's loss is multiplied with, by group.

    step: 1 / entries of all groups. group: 1 / (groups with entries * entries of the group).
    """
    counts = [forest.entry_count for forest in forests]
    if normalisation == "step":
        return [1 / max(1, sum(counts))] * len(counts)
    groups = sum(count > 0 for count in counts)
    return [1 / (groups * count) if count else 0.0 for count in counts]


def forward_backward(
    policy: Policy,
    forests: Sequence[Forest],
    microbatches: Sequence[Microbatch],
    *,
    weights: Sequence[float],
    loss: LossFunction,
    head_chunk: int,
) -> EntryValues:
    """Add the gradients of these microbatches to the parameters; return what was seen.

    Args:
        policy: parameters' `.grad` is added to.
        forests: of the step, one for each group.
        microbatches: of this rank.
        weights: of each group, from `group_weights`.
        loss: of the run.
        head_chunk: rows of logits at once.
    """
    parts = []
    for microbatch in microbatches:
        forest = joined([forests[group] for group in microbatch.groups])
        weight_G = np.array([weights[group] for group in microbatch.groups])
        run = _Run(policy, forest, weight_G[forest.entry_group_E], loss, head_chunk)
        if len(microbatch.blocks) == 1:
            parts.append(run.whole())
            continue
        keys = run.path_keys(microbatch.blocks, is_offloaded=microbatch.is_offloaded)
        parts.append(run.in_blocks(microbatch.blocks, keys))
    return merged(parts)


def read_logprobs(
    policy: Policy, forest: Forest, microbatch: Microbatch, *, head_chunk: int
) -> Floats:
    """The policy's log-probability of every entry of a microbatch's forest; no gradient."""
    run = _Run(policy, forest, np.zeros(forest.entry_count), loss_function(Loss()), head_chunk)
    keys = run.path_keys(microbatch.blocks, is_offloaded=microbatch.is_offloaded)
    return np.asarray(run.logprobs(microbatch.blocks, keys).double().cpu().numpy())


def forward_backward_shared(
    policy: Policy,
    forest: Forest,
    blocks: Sequence[Sequence[Range]],
    *,
    peers: Peers,
    weight: float,
    loss: LossFunction,
    head_chunk: int,
) -> EntryValues:
    """Add this rank's part of one group's gradients; every rank calls it with the same group.

    Args:
        policy: its parameters' gradients, summed over the ranks, are those of the group.
        forest: of the group.
        blocks: of its layout, in order; for each of them the ranks' query ranges.
        peers: the ranks.
        weight: of the group, from `group_weights`.
        loss: of the run.
        head_chunk: rows of logits at once.

    Returns:
        The same on every rank: all entries of the group.
    """
    weight_E = np.full(forest.entry_count, weight)
    run = _Run(policy, forest, weight_E, loss, head_chunk)
    exchanges = [KeyExchange(ranges=tuple(ranges), peers=peers) for ranges in blocks]
    own = [ranges[peers.rank] for ranges in blocks]
    return run.in_blocks(own, run.whole_keys(own), exchanges)


def merged(parts: Sequence[EntryValues]) -> EntryValues:
    """The values of several parts of a step as one."""

    def all_of(name: str) -> Floats:
        arrays = [getattr(part, name) for part in parts]
        return np.concatenate(arrays) if arrays else np.zeros(0)

    return EntryValues(
        logprob_E=all_of("logprob_E"),
        behaviour_E=all_of("behaviour_E"),
        loss_E=all_of("loss_E"),
        is_limited_E=all_of("is_limited_E").astype(np.bool_),
        entropy_E=all_of("entropy_E"),
        version_E=all_of("version_E").astype(np.int64),
        reference_E=all_of("reference_E"),
        loss=float(sum(part.loss for part in parts)),
    )


class _Run:
    """One microbatch; made for it and dropped after it."""

    def __init__(
        self,
        policy: Policy,
        forest: Forest,
        weight_E: Floats,
        loss: LossFunction,
        head_chunk: int,
    ) -> None:
        self._policy = policy
        self._forest = forest
        self._pieces = pieces(forest)
        self._loss = loss
        self._head_chunk = head_chunk
        self._device = policy.head_VH.device
        self._wide = torch.promote_types(policy.head_VH.dtype, torch.float32)
        self._tokens_N = torch.from_numpy(forest.tokens_N).to(self._device)
        self._position_N = torch.from_numpy(forest.position_N).to(self._device)
        self._weight_E = self._values(weight_E)
        self._entries = self._entries_of(forest)
        self._routes = None
        if policy.routers:
            top_k = policy.routers[0].top_k
            self._routes = token_routes(forest, layers=len(policy.routers), top_k=top_k)

    def whole(self) -> EntryValues:
        """All tokens at once."""
        count = self._forest.token_count
        logprob_E = torch.zeros(self._forest.entry_count, dtype=self._wide, device=self._device)
        entropy_E = torch.zeros_like(logprob_E)
        edges = self._edges(0, count)
        if len(edges.entry_E) == 0:
            return self._seen(logprob_E, entropy_E, self._loss(logprob_E, self._entries))
        whole = BlockKeys(
            plan=attention_plan(self._pieces, start=0, end=count),
            carries=(),
            subtree_end_S=self._forest.subtree_end_N,
        )
        hidden = self._hidden(0, count, keys=whole)
        logprob_J, entropy_R = self._logprobs(hidden, edges, start=0)
        logprob_E = logprob_E.index_copy(0, edges.entry_E, logprob_J[edges.edge_of_entry_E])
        entropy_E[edges.entry_E] = entropy_R[edges.row_J[edges.edge_of_entry_E]]
        result = self._loss(logprob_E, self._entries)
        (result.loss * self._weight_E).sum().backward()  # type: ignore[no-untyped-call]
        return self._seen(logprob_E, entropy_E, result)

    def in_blocks(
        self,
        blocks: Sequence[Range],
        keys: CarriedKeys,
        exchanges: Sequence[KeyExchange] = (),
    ) -> EntryValues:
        """Block by block; the same gradients, in the memory of one block and the carries.

        With an exchange for each block, `blocks` are this rank's ranges of them.
        """
        all_edges = [self._edges(start, end) for start, end in blocks]
        logprob_E, entropy_E = self._read(blocks, all_edges, keys, exchanges)
        logprob_E.requires_grad_()
        result = self._loss(logprob_E, self._entries)
        (owed_E,) = torch.autograd.grad((result.loss * self._weight_E).sum(), logprob_E)
        keys.turn()
        between: Sequence[KeyExchange | None] = exchanges or [None] * len(blocks)
        for number, (start, end) in reversed(list(enumerate(blocks))):
            edges = all_edges[number]
            hidden = self._hidden(start, end, keys=keys.enter(number), exchange=between[number])
            logprob_J, _ = self._logprobs(hidden, edges, start=start)
            owed_J = torch.zeros_like(logprob_J)
            owed_J.index_add_(0, edges.edge_of_entry_E, owed_E[edges.entry_E])
            # The zero hidden gradient reaches the keys of a block that no entry continues.
            torch.autograd.backward([logprob_J, hidden], [owed_J, torch.zeros_like(hidden)])
        return self._seen(logprob_E, entropy_E, result)

    def logprobs(self, blocks: Sequence[Range], keys: CarriedKeys) -> Tensor:
        """Log-probability of every entry, block by block; no gradient."""
        return self._read(blocks, [self._edges(*block) for block in blocks], keys)[0]

    @torch.no_grad()
    def _read(
        self,
        blocks: Sequence[Range],
        all_edges: Sequence[Edges],
        keys: CarriedKeys,
        exchanges: Sequence[KeyExchange] = (),
    ) -> tuple[Tensor, Tensor]:
        between: Sequence[KeyExchange | None] = exchanges or [None] * len(blocks)
        logprob_E = torch.zeros(self._forest.entry_count, dtype=self._wide, device=self._device)
        entropy_E = torch.zeros_like(logprob_E)
        for number, (start, end) in enumerate(blocks):
            edges = all_edges[number]
            hidden = self._hidden(start, end, keys=keys.enter(number), exchange=between[number])
            logprob_J, entropy_R = self._logprobs(hidden, edges, start=start)
            logprob_E[edges.entry_E] = logprob_J[edges.edge_of_entry_E]
            entropy_E[edges.entry_E] = entropy_R[edges.row_J[edges.edge_of_entry_E]]
        if exchanges:  # Each entry was read on one rank and is 0 on the others.
            logprob_E = exchanges[0].peers.total(logprob_E)
            entropy_E = exchanges[0].peers.total(entropy_E)
        return logprob_E, entropy_E

    def _hidden(
        self,
        start: int,
        end: int,
        *,
        keys: BlockKeys,
        exchange: KeyExchange | None = None,
    ) -> Tensor:
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

    def _replay(self, start: int, end: int) -> None:
        expert_TLK = None
        if self._routes is not None:
            expert_TLK = torch.from_numpy(self._routes.expert_NLK[start:end]).to(self._device)
        for layer, router in enumerate(self._policy.routers):
            router.replayed_TK = None if expert_TLK is None else expert_TLK[:, layer]

    def _logprobs(self, hidden: Tensor, edges: Edges, *, start: int) -> tuple[Tensor, Tensor]:
        rows = hidden.index_select(0, edges.source_R - start)
        gather = self._policy.gather_head
        head_VH = self._policy.head_VH if gather is None else gather()
        return edge_logprobs(rows, head_VH, edges, chunk=self._head_chunk)

    def _edges(self, start: int, end: int) -> Edges:
        edges = edges_of(self._forest, start=start, end=end)
        return Edges(
            entry_E=edges.entry_E.to(self._device),
            edge_of_entry_E=edges.edge_of_entry_E.to(self._device),
            source_R=edges.source_R.to(self._device),
            temperature_R=edges.temperature_R.to(self._device),
            row_J=edges.row_J.to(self._device),
            target_J=edges.target_J.to(self._device),
        )

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

    def _values(self, array: Floats) -> Tensor:
        return torch.from_numpy(array).to(self._device, self._wide)

    def _entries_of(self, forest: Forest) -> Entries:
        return Entries(
            behaviour=self._values(forest.entry_logprob_E),
            advantage=self._values(forest.entry_advantage_E),
            temperature=self._values(forest.entry_temperature_E),
            version=torch.from_numpy(forest.entry_version_E).to(self._device),
            token=torch.from_numpy(forest.entry_token_E).to(self._device),
            sample=torch.from_numpy(forest.entry_sample_E).to(self._device),
            group=torch.from_numpy(forest.entry_group_E).to(self._device),
            sample_count=forest.sample_count,
            reference=None
            if np.isnan(forest.entry_reference_E).all()
            else self._values(forest.entry_reference_E),
        )

    def _seen(self, logprob_E: Tensor, entropy_E: Tensor, result: EntryLoss) -> EntryValues:
        def array(values: Tensor) -> Floats:
            return np.asarray(values.detach().double().cpu().numpy())

        return EntryValues(
            logprob_E=array(logprob_E),
            behaviour_E=self._forest.entry_logprob_E,
            loss_E=array(result.loss),
            is_limited_E=result.is_limited.cpu().numpy(),
            entropy_E=array(entropy_E),
            version_E=self._forest.entry_version_E,
            reference_E=self._forest.entry_reference_E,
            loss=float((result.loss.detach() * self._weight_E).sum()),
        )
