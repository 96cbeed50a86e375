"""One optimizer step's forward and backward on one of several ranks: all rounds, in order."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.assignment import Round
from forgemq_trainer.core.attention.exchange import Peers
from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.drafting import Drafting
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.loss import Entries, EntryLoss
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.reference import read_forests, read_logprobs
from forgemq_trainer.core.step import (
    EntryValues,
    Objective,
    forward_backward,
    forward_backward_together,
    merged,
    read_together,
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


class RankTeams(Protocol):
    """All ranks, as the computation uses them."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    def team(self, ranks: Range) -> Peers:
        """The ranks of a team that this rank is in, of at least two ranks."""
        ...

    def all_reduce(self, own: Tensor) -> Tensor:
        """Sum of `own` over all ranks."""
        ...


def forward_backward_rounds(
    policy: PolicyModel,
    objective: Objective,
    rounds: Sequence[Round],
    *,
    peers: RankTeams,
    head_chunk: int,
    drafting: Drafting | None = None,
) -> EntryValues:
    """Add the gradients of the step; every rank goes through the same rounds.

    Args:
        policy: Its parameters' gradients are summed over the ranks as they are computed.
        objective: Of the step, the same on every rank.
        rounds: From `rounds_of`.
        peers: The ranks.
        head_chunk: Rows of logits that exist at once.
        drafting: Adds this rank's part of a draft head's gradients; None without one.

    Returns:
        The values of this rank's entries. Entries of a team's groups are returned by its first rank
        only, so all ranks' values together have every entry once.
    """
    parts: list[EntryValues] = []
    for planned in rounds:
        team = planned.team_of(peers.rank)
        if team is None:
            layers = planned.recomputed_layers
            run_empty_blocks(policy, planned.block_count, recomputed_layers=layers)
        elif team.size == 1:
            values = forward_backward(
                policy,
                objective,
                [team.microbatch()],
                head_chunk=head_chunk,
                drafting=drafting,
            )
            parts.append(values)
        else:
            values = forward_backward_together(
                policy,
                objective,
                team,
                peers=peers.team(team.ranks),
                head_chunk=head_chunk,
                drafting=drafting,
            )
            if peers.rank == team.ranks[0]:
                parts.append(values)
    return merged(parts)


def read_rounds(
    policy: PolicyModel,
    forests: Sequence[Forest],
    rounds: Sequence[Round],
    *,
    peers: RankTeams,
    head_chunk: int,
) -> list[Floats]:
    """Log-probability of each entry of each forest, nats; every rank goes through the same rounds.

    Args:
        policy: Its parameters get no gradients.
        forests: One for each group of the step, the same on every rank.
        rounds: From `rounds_of`.
        peers: The ranks.
        head_chunk: Rows of logits that exist at once.

    Returns:
        The same on every rank.
    """
    read = [np.zeros(forest.entry_count) for forest in forests]
    for planned in rounds:
        team = planned.team_of(peers.rank)
        if team is None:
            _read_empty_blocks(policy, planned.block_count)
        elif team.size == 1:
            own = read_forests(policy, forests, [team.microbatch()], head_chunk=head_chunk)
            for group in team.groups:
                read[group] = own[group]
        else:
            together = read_together(
                policy, forests, team, peers=peers.team(team.ranks), head_chunk=head_chunk
            )
            if peers.rank == team.ranks[0]:  # All have it; the sum below takes one of them.
                for group, logprob_E in together.items():
                    read[group] = logprob_E
    # Each entry was read on one rank and is 0 on the others.
    all_E = torch.from_numpy(np.concatenate([*read, np.zeros(0)])).to(policy.head_VH.device)
    summed_E = peers.all_reduce(all_E).cpu().numpy()
    ends = np.cumsum([len(own_E) for own_E in read])
    return np.split(summed_E, ends)[: len(read)]


def run_empty_blocks(policy: PolicyModel, count: int, *, recomputed_layers: int) -> None:
    """Run two tokens as often as a group in so many blocks; adds zero to every gradient.

    The other ranks' passes gather the parameters' shards from all ranks (FSDP), and their tokens
    may travel to this rank's experts, also from layers that they recompute. So this rank has to
    take part even if it has nothing to train.
    """
    if count > 1:  # Blocks first go forward for all log-probabilities.
        _read_empty_blocks(policy, count)
    for _ in range(count):
        forward_backward(
            policy,
            Objective(forests=[_two_tokens()], loss_weights=[0.0], loss=_zero_loss),
            [replace(_EMPTY, recomputed_layers=recomputed_layers)],
            head_chunk=1,
        )


def _read_empty_blocks(policy: PolicyModel, count: int) -> None:
    for _ in range(count):
        read_logprobs(policy, _two_tokens(), _EMPTY, head_chunk=1)


_EMPTY = Microbatch(groups=(0,), blocks=((0, 2),))
"""Of `_two_tokens`."""


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
