"""One optimizer step's forward and backward on one of several ranks: all rounds, in order."""

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.assignment import Round, SharedRound
from forgemq_trainer.core.attention.exchange import Peers
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.loss import Entries, EntryLoss
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.reference import read_forests, read_logprobs
from forgemq_trainer.core.step import (
    EntryValues,
    Objective,
    forward_backward,
    forward_backward_shared,
    merged,
    read_shared,
)
from forgemq_trainer.core.tree import Floats, Forest, read_tree

_ENTRY_ARRAYS = (
    "logprob_E",
    "behaviour_E",
    "loss_E",
    "is_limited_E",
    "entropy_E",
    "version_E",
    "reference_E",
    "is_supervised_E",
)
"""Fields of `EntryValues`, in the order in which ranks send them."""

_SUMS = struct.Struct("<dq")
"""Before the arrays: `loss` and `route_disagreements`."""


def values_bytes(values: EntryValues) -> bytes:
    """Values that a rank sends to rank 0; both run one version of this package."""
    arrays = [getattr(values, name) for name in _ENTRY_ARRAYS]
    columns = np.stack([array.astype(np.float64) for array in arrays])
    return _SUMS.pack(values.loss, values.route_disagreements) + columns.tobytes()


def values_of(data: bytes) -> EntryValues:
    """The values in bytes from `values_bytes`."""
    loss, route_disagreements = _SUMS.unpack_from(data)
    columns = np.frombuffer(data, np.float64, offset=_SUMS.size).reshape(len(_ENTRY_ARRAYS), -1)
    return EntryValues(
        logprob_E=columns[0],
        behaviour_E=columns[1],
        loss_E=columns[2],
        is_limited_E=columns[3].astype(np.bool_),
        entropy_E=columns[4],
        version_E=columns[5].astype(np.int64),
        reference_E=columns[6],
        is_supervised_E=columns[7].astype(np.bool_),
        loss=loss,
        route_disagreements=route_disagreements,
    )


def forward_backward_rounds(
    policy: PolicyModel,
    objective: Objective,
    rounds: Sequence[Round],
    *,
    peers: Peers,
    head_chunk: int,
) -> EntryValues:
    """Add the gradients of the step; every rank goes through the same rounds.

    Args:
        policy: Its parameters' gradients are summed over the ranks as they are computed.
        objective: Of the step, the same on every rank.
        rounds: From `plan_rounds`.
        peers: The ranks.
        head_chunk: Rows of logits that exist at once.

    Returns:
        The values of this rank's entries. Entries of shared groups are returned by rank 0 only, so
        all ranks' values together have every entry once.
    """
    parts: list[EntryValues] = []
    for planned in rounds:
        if isinstance(planned, SharedRound):
            values = forward_backward_shared(
                policy, objective, planned, peers=peers, head_chunk=head_chunk
            )
            if peers.rank == 0:
                parts.append(values)
            continue
        microbatch = planned.microbatch_of_rank[peers.rank]
        if microbatch is None:
            run_empty_microbatch(policy, recomputed_layers=planned.recomputed_layers)
            continue
        parts.append(forward_backward(policy, objective, [microbatch], head_chunk=head_chunk))
    return merged(parts)


def read_rounds(
    policy: PolicyModel,
    forests: Sequence[Forest],
    rounds: Sequence[Round],
    *,
    peers: Peers,
    head_chunk: int,
) -> list[Floats]:
    """Log-probability of each entry of each forest, nats; every rank goes through the same rounds.

    Args:
        policy: Its parameters get no gradients.
        forests: One for each group of the step, the same on every rank.
        rounds: From `plan_rounds`.
        peers: The ranks.
        head_chunk: Rows of logits that exist at once.

    Returns:
        The same on every rank.
    """
    read = [np.zeros(forest.entry_count) for forest in forests]
    for planned in rounds:
        if isinstance(planned, SharedRound):
            logprob_E = read_shared(
                policy, forests[planned.group], planned, peers=peers, head_chunk=head_chunk
            )
            if peers.rank == 0:  # All ranks have it; the sum below takes one of them.
                read[planned.group] = logprob_E
            continue
        microbatch = planned.microbatch_of_rank[peers.rank]
        if microbatch is None:
            # As in `run_empty_microbatch`, without a backward.
            empty = Microbatch(groups=(0,), blocks=((0, 2),))
            read_logprobs(policy, _two_tokens(), empty, head_chunk=1)
            continue
        own = read_forests(policy, forests, [microbatch], head_chunk=head_chunk)
        for group in microbatch.groups:
            read[group] = own[group]
    # Each entry was read on one rank and is 0 on the others.
    all_E = torch.from_numpy(np.concatenate([*read, np.zeros(0)])).to(policy.head_VH.device)
    summed_E = peers.all_reduce(all_E).cpu().numpy()
    ends = np.cumsum([len(own_E) for own_E in read])
    return np.split(summed_E, ends)[: len(read)]


def run_empty_microbatch(policy: PolicyModel, *, recomputed_layers: int) -> None:
    """Run a two-token forward and backward with zero loss; adds zero to every gradient.

    The other ranks' forward gathers the parameters' shards from all ranks (FSDP), and their tokens
    may travel to this rank's experts, also from layers that they recompute. So this rank has to
    take part even if it has nothing to train.
    """
    forward_backward(
        policy,
        Objective(forests=[_two_tokens()], loss_weights=[0.0], loss=_zero_loss),
        [Microbatch(groups=(0,), blocks=((0, 2),), recomputed_layers=recomputed_layers)],
        head_chunk=1,
    )


def _zero_loss(logprob: Tensor, _entries: Entries) -> EntryLoss:
    return EntryLoss(logprob * 0, torch.zeros_like(logprob, dtype=torch.bool))


def _two_tokens() -> Forest:
    def ints(*values: int) -> bytes:
        return np.array(values, "<i4").tobytes()

    def floats(value: float) -> bytes:
        return np.array([value], "<f4").tobytes()

    return read_tree(
        MergedTree(
            group_id="empty",
            domain="empty",
            tokens=ints(0, 0),
            segment_start=ints(0),
            segment_length=ints(2),
            segment_parent=ints(-1),
            entry_token=ints(1),
            entry_logprob=floats(-1.0),
            entry_version=ints(0),
            sample_first_entry=ints(0, 1),
            sample_advantage=floats(0.0),
            sample_temperature=floats(1.0),
            sample_leaf=ints(1),
            sample_episode=ints(0),
            sample_turn=ints(0),
            sample_ids=("empty",),
        )
    )
