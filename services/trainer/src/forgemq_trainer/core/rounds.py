"""One optimizer step's forward and backward on one of several ranks: all rounds, in order."""

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.assignment import OwnRound, Round
from forgemq_trainer.core.attention.exchange import Peers
from forgemq_trainer.core.forward import Policy
from forgemq_trainer.core.loss import Entries, EntryLoss, LossFunction
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.step import (
    EntryValues,
    forward_backward,
    forward_backward_shared,
    merged,
)
from forgemq_trainer.core.tree import Forest, read_tree

_ENTRY_ARRAYS = (
    "logprob_E",
    "behaviour_E",
    "loss_E",
    "is_limited_E",
    "entropy_E",
    "version_E",
    "reference_E",
)
"""Of `EntryValues`, in the order of its form between ranks."""


def values_bytes(values: EntryValues) -> bytes:
    """What a rank saw, for rank 0: between processes of one version of this package."""
    arrays = [getattr(values, name) for name in _ENTRY_ARRAYS]
    columns = np.stack([array.astype(np.float64) for array in arrays])
    return struct.pack("<d", values.loss) + columns.tobytes()


def values_of(data: bytes) -> EntryValues:
    """What `values_bytes` wrote."""
    columns = np.frombuffer(data, np.float64, offset=8).reshape(len(_ENTRY_ARRAYS), -1)
    return EntryValues(
        logprob_E=columns[0],
        behaviour_E=columns[1],
        loss_E=columns[2],
        is_limited_E=columns[3].astype(np.bool_),
        entropy_E=columns[4],
        version_E=columns[5].astype(np.int64),
        reference_E=columns[6],
        loss=struct.unpack_from("<d", data)[0],
    )


def forward_backward_rounds(
    policy: Policy,
    forests: Sequence[Forest],
    rounds: Sequence[Round],
    *,
    peers: Peers,
    weights: Sequence[float],
    loss: LossFunction,
    head_chunk: int,
) -> EntryValues:
    """Add the gradients of the step; every rank goes through the same rounds.

    Args:
        policy: its parameters' gradients are summed over the ranks as they come.
        forests: of the step, one for each group, the same on every rank.
        rounds: from `plan_rounds`.
        peers: the ranks.
        weights: of each group, from `group_weights` over all of them.
        loss: of the run.
        head_chunk: rows of logits at once.

    Returns:
        What this rank saw; of shared groups rank 0 alone reports, so the ranks' values add up.
    """
    parts: list[EntryValues] = []
    for planned in rounds:
        if isinstance(planned, OwnRound):
            microbatch = planned.microbatch_of_rank[peers.rank]
            if microbatch is None:
                keep_company(policy)
                continue
            parts.append(
                forward_backward(
                    policy, forests, [microbatch], weights=weights, loss=loss, head_chunk=head_chunk
                )
            )
            continue
        seen = forward_backward_shared(
            policy,
            forests[planned.group],
            planned.blocks,
            peers=peers,
            weight=weights[planned.group],
            loss=loss,
            head_chunk=head_chunk,
        )
        if peers.rank == 0:
            parts.append(seen)
    return merged(parts)


def keep_company(policy: Policy) -> None:
    """One forward and backward of two tokens without loss: zeros are added to every gradient.

    The other ranks gather the parameters for their microbatch, and wait for this rank to do so too.
    """
    forward_backward(
        policy,
        [_two_tokens()],
        [Microbatch(groups=(0,), blocks=((0, 2),))],
        weights=[0.0],
        loss=_nothing,
        head_chunk=1,
    )


def _nothing(logprob: Tensor, _entries: Entries) -> EntryLoss:
    return EntryLoss(logprob * 0, torch.zeros_like(logprob, dtype=torch.bool))


def _two_tokens() -> Forest:
    def ints(*values: int) -> bytes:
        return np.array(values, "<i4").tobytes()

    def floats(value: float) -> bytes:
        return np.array([value], "<f4").tobytes()

    return read_tree(
        MergedTree(
            group_id="company",
            domain="company",
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
            sample_ids=("company",),
        )
    )
