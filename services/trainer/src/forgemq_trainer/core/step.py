"""Forward and backward of one optimizer step over its trees.

The denominator of every group is fixed before any backward. A microbatch that fits is one forward
and one backward. One that runs in blocks takes two passes: first every block forward without
gradient, which gives all log-probabilities, hence the loss and what it owes to each of them; then
every block again in reverse order, forward and backward, with the gradients of keys and values
carried from later blocks to earlier ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from forgemq_trainer.core.assignment import Range
from forgemq_trainer.core.attention.carry import CarriedKeys
from forgemq_trainer.core.attention.exchange import KeyExchange, Peers
from forgemq_trainer.core.forward import Policy, TreeForward
from forgemq_trainer.core.loss import Entries, EntryLoss, LossFunction
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.tree import Floats, Forest, Integers, joined


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
        weight_E = weight_G[forest.entry_group_E]
        objective = _Objective(forest, weight_E, loss, like=policy.head_VH)
        forward = TreeForward(policy, forest, head_chunk=head_chunk)
        if len(microbatch.blocks) == 1:
            parts.append(_whole(forward, objective))
            continue
        keys = forward.path_keys(microbatch.blocks, is_offloaded=microbatch.is_offloaded)
        parts.append(_in_blocks(forward, objective, microbatch.blocks, keys))
    return merged(parts)


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
    objective = _Objective(forest, weight_E, loss, like=policy.head_VH)
    forward = TreeForward(policy, forest, head_chunk=head_chunk)
    exchanges = [KeyExchange(ranges=tuple(ranges), peers=peers) for ranges in blocks]
    own = [ranges[peers.rank] for ranges in blocks]
    return _in_blocks(forward, objective, own, forward.whole_keys(own), exchanges)


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


class _Objective:
    """What a step minimises over one forest: the weighted losses of its entries."""

    def __init__(
        self, forest: Forest, weight_E: Floats, loss: LossFunction, *, like: Tensor
    ) -> None:
        """`like` says the device, and the dtype where that is wider than float32."""
        self._forest = forest
        self._loss = loss
        self._device = like.device
        self._wide = torch.promote_types(like.dtype, torch.float32)
        self._weight_E = self._values(weight_E)
        self._entries = self._entries_of(forest)

    def of(self, logprob_E: Tensor) -> tuple[Tensor, EntryLoss]:
        """The sum that backward starts at, and the loss of each entry."""
        result = self._loss(logprob_E, self._entries)
        return (result.loss * self._weight_E).sum(), result

    def seen(
        self, logprob_E: Tensor, entropy_E: Tensor, total: Tensor, result: EntryLoss
    ) -> EntryValues:
        """What is told of the step."""
        return EntryValues(
            logprob_E=_array(logprob_E),
            behaviour_E=self._forest.entry_logprob_E,
            loss_E=_array(result.loss),
            is_limited_E=result.is_limited.cpu().numpy(),
            entropy_E=_array(entropy_E),
            version_E=self._forest.entry_version_E,
            reference_E=self._forest.entry_reference_E,
            loss=float(total.detach()),
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


def _array(values: Tensor) -> Floats:
    return np.asarray(values.detach().double().cpu().numpy())


def _whole(forward: TreeForward, objective: _Objective) -> EntryValues:
    """All tokens at once."""
    logprob_E, entropy_E = forward.whole()
    total, result = objective.of(logprob_E)
    if logprob_E.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    return objective.seen(logprob_E, entropy_E, total, result)


def _in_blocks(
    forward: TreeForward,
    objective: _Objective,
    blocks: Sequence[Range],
    keys: CarriedKeys,
    exchanges: Sequence[KeyExchange] = (),
) -> EntryValues:
    """Block by block; the same gradients, in the memory of one block and the carries.

    With an exchange for each block, `blocks` are this rank's ranges of them.
    """
    all_edges = [forward.edges(start, end) for start, end in blocks]
    logprob_E, entropy_E = forward.read(blocks, all_edges, keys, exchanges)
    logprob_E.requires_grad_()
    total, result = objective.of(logprob_E)
    (owed_E,) = torch.autograd.grad(total, logprob_E)
    keys.turn()
    between: Sequence[KeyExchange | None] = exchanges or [None] * len(blocks)
    for number, (start, end) in reversed(list(enumerate(blocks))):
        edges = all_edges[number]
        hidden = forward.hidden(start, end, keys=keys.enter(number), exchange=between[number])
        logprob_J, _ = forward.logprobs(hidden, edges, start=start)
        owed_J = torch.zeros_like(logprob_J)
        owed_J.index_add_(0, edges.edge_of_entry_E, owed_E[edges.entry_E])
        # The zero hidden gradient reaches the keys of a block that no entry continues.
        torch.autograd.backward([logprob_J, hidden], [owed_J, torch.zeros_like(hidden)])
    return objective.seen(logprob_E, entropy_E, total, result)
