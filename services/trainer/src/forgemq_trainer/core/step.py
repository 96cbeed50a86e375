"""Forward and backward of one optimizer update over its trees.

The loss weight of every group is fixed before any backward (`loss_weights`). A microbatch that fits
is one forward and one backward. One that runs in blocks takes two passes: first every block forward
without gradient, which gives all log-probabilities, hence the loss and its gradient for each of
them; then every block again in reverse order, forward and backward, with the gradients of keys and
values carried from later blocks to earlier ones.

E entries (sampling events), J edges, G groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from forgemq_trainer.core.attention.carry import LayoutRun, PathKeys, TeamBlocks
from forgemq_trainer.core.attention.exchange import Peers
from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.drafting import Drafting
from forgemq_trainer.core.forward import PolicyModel, TreeForward
from forgemq_trainer.core.logprobs import Edges
from forgemq_trainer.core.loss import Entries, EntryLoss, LossFunction
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.team_plans import Team
from forgemq_trainer.core.tree import Floats, Forest, Integers, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What one optimizer update minimises: the sum over all entries of loss times loss weight.

    Attributes:
        forests: One for each of its groups.
        loss_weights: One for each group; every entry's loss is multiplied by its group's.
        loss: Gives the loss of each entry.
    """

    forests: Sequence[Forest]
    loss_weights: Sequence[float]
    loss: LossFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryValues:
    """What a step computed for every loss entry: float64, int64 and bool arrays of E values.

    Attributes:
        logprob_E: The policy's, at the sampling temperature, before this step.
        behaviour_E: As recorded at sampling.
        loss_E: Before the loss weight.
        is_limited_E: True if a cap, clip or mask took hold.
        entropy_E: Of the policy's distribution at the sampled token.
        version_E: Weight version that sampled it.
        reference_E: Log-probability under the reference; NaN if the entry has no reference.
        is_supervised_E: True for tokens of replies that were given and not sampled.
        loss: Sum of the weighted losses.
        route_disagreements: Entries whose recorded experts are not those the token ran through.
    """

    logprob_E: Floats
    behaviour_E: Floats
    loss_E: Floats
    is_limited_E: np.ndarray[tuple[int], np.dtype[np.bool_]]
    entropy_E: Floats
    version_E: Integers
    reference_E: Floats
    is_supervised_E: np.ndarray[tuple[int], np.dtype[np.bool_]]
    loss: float
    route_disagreements: int = 0


def forward_backward(
    policy: PolicyModel,
    objective: Objective,
    microbatches: Sequence[Microbatch],
    *,
    head_chunk: int,
    drafting: Drafting | None = None,
) -> EntryValues:
    """Add the objective's gradients over these microbatches to the parameters' `.grad`.

    Args:
        policy: Its parameters get the gradients.
        objective: The whole step's; its loss weights count entries of all ranks.
        microbatches: Those of this rank; their groups are indices into the objective's.
        head_chunk: Rows of logits that exist at once.
        drafting: Adds the gradients of a draft head after each microbatch; None without one.

    Returns:
        The values of the microbatches' entries.
    """
    return merged(
        [
            _add_gradients(
                policy,
                objective,
                microbatch.groups,
                run=LayoutRun(blocks=microbatch.blocks, is_offloaded=microbatch.is_offloaded),
                compute=partial(_run, microbatch=microbatch),
                head_chunk=head_chunk,
                drafting=drafting,
            )
            for microbatch in microbatches
        ]
    )


def forward_backward_together(
    policy: PolicyModel,
    objective: Objective,
    team: Team,
    *,
    peers: Peers,
    head_chunk: int,
    drafting: Drafting | None = None,
) -> EntryValues:
    """Add this rank's part of some groups' gradients; every rank of a team makes the same call.

    Args:
        policy: Its parameters' gradients, summed over the ranks, are those of the groups.
        objective: The whole step's; the team names groups of it.
        team: The groups, their blocks and the ranks' query ranges in each of them.
        peers: The ranks of the team, at least two.
        head_chunk: Rows of logits that exist at once.
        drafting: Adds this rank's part of a draft head's gradients; None without one.

    Returns:
        All entries of the groups, the same on every rank.
    """
    run = _team_run(team, peers)
    return _add_gradients(
        policy,
        objective,
        team.groups,
        run=run,
        compute=partial(_run_together, run=run, peers=peers),
        head_chunk=head_chunk,
        drafting=drafting,
    )


def _add_gradients(
    policy: PolicyModel,
    objective: Objective,
    groups: Sequence[int],
    *,
    run: LayoutRun,
    compute: Callable[[TreeForward, "_ForestLoss"], EntryValues],
    head_chunk: int,
    drafting: Drafting | None,
) -> EntryValues:
    """Add the gradients of groups that lie side by side in one layout, then those of a draft head.

    Args:
        policy: Its parameters get the gradients.
        objective: The whole step's.
        groups: Indices into its forests.
        run: Of their layout on this rank.
        compute: Runs the policy forward and backward.
        head_chunk: Rows of logits that exist at once.
        drafting: None without a draft head.
    """
    forest = joined([objective.forests[group] for group in groups])
    loss_weight_G = np.array([objective.loss_weights[group] for group in groups])
    loss_weight_E = loss_weight_G[forest.entry_group_E]
    forest_loss = _ForestLoss(forest, loss_weight_E, objective.loss, like=policy.head_VH)
    states = None if drafting is None else drafting.room(forest, run)
    forward = TreeForward(policy, forest, head_chunk=head_chunk, states=states)
    values = compute(forward, forest_loss)
    if drafting is not None and states is not None:
        drafting.add_gradients(forest, states, run, head_chunk=head_chunk)
    return replace(values, route_disagreements=forward.route_disagreements)


def read_together(
    policy: PolicyModel, forests: Sequence[Forest], team: Team, *, peers: Peers, head_chunk: int
) -> dict[int, Floats]:
    """Log-probability of each entry, nats, by group of the team, the same on each of its ranks."""
    forest = joined([forests[group] for group in team.groups])
    forward = TreeForward(policy, forest, head_chunk=head_chunk)
    run = _team_run(team, peers)
    edges = [forward.edges(start, end) for start, end in run.blocks]
    read_E = _array(forward.read(run.blocks, edges, _team_keys(forward, run), peers)[0])
    return {group: read_E[forest.entry_group_E == index] for index, group in enumerate(team.groups)}


def _team_run(team: Team, peers: Peers) -> LayoutRun:
    """How this rank runs a team's layout: its ranges of the blocks."""
    return LayoutRun(
        blocks=[ranges[peers.rank] for ranges in team.blocks],
        is_offloaded=team.is_offloaded,
        team=TeamBlocks(ranges=team.blocks, peers=peers),
    )


def _team_keys(forward: TreeForward, run: LayoutRun) -> PathKeys:
    return forward.path_keys(run.blocks, is_offloaded=run.is_offloaded, team=run.team)


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
        is_supervised_E=all_of("is_supervised_E").astype(np.bool_),
        loss=float(sum(part.loss for part in parts)),
        route_disagreements=sum(part.route_disagreements for part in parts),
    )


class _ForestLoss:
    """The weighted loss of one forest, from the log-probabilities of its entries."""

    def __init__(
        self, forest: Forest, loss_weight_E: Floats, loss: LossFunction, *, like: Tensor
    ) -> None:
        """Copy what the loss reads to the device of `like`, in at least fp32."""
        self._forest = forest
        self._loss = loss
        self._device = like.device
        self._wide = torch.promote_types(like.dtype, torch.float32)
        self._loss_weight_E = self._values(loss_weight_E)
        self._entries = self._entries_of(forest)

    def of(self, logprob_E: Tensor) -> tuple[Tensor, EntryLoss]:
        """The scalar that backward starts from, and the loss of each entry."""
        result = self._loss(logprob_E, self._entries)
        return (result.loss * self._loss_weight_E).sum(), result

    def values(
        self, logprob_E: Tensor, entropy_E: Tensor, total: Tensor, result: EntryLoss
    ) -> EntryValues:
        """The entries' values on the host, for the step's metrics."""
        return EntryValues(
            logprob_E=_array(logprob_E),
            behaviour_E=self._forest.entry_logprob_E,
            loss_E=_array(result.loss),
            is_limited_E=result.is_limited.cpu().numpy(),
            entropy_E=_array(entropy_E),
            version_E=self._forest.entry_version_E,
            reference_E=self._forest.entry_reference_E,
            is_supervised_E=self._forest.entry_is_supervised_E,
            loss=float(total.detach()),
        )

    def _values(self, array: Floats) -> Tensor:
        return torch.from_numpy(array).to(self._device, self._wide)

    def _entries_of(self, forest: Forest) -> Entries:
        is_supervised_E = forest.entry_is_supervised_E
        return Entries(
            behaviour=self._values(forest.entry_logprob_E),
            advantage=self._values(forest.entry_advantage_E),
            temperature=self._values(forest.entry_temperature_E),
            version=torch.from_numpy(forest.entry_version_E).to(self._device),
            token=torch.from_numpy(forest.entry_token_E).to(self._device),
            sample=torch.from_numpy(forest.entry_sample_E).to(self._device),
            group=torch.from_numpy(forest.entry_group_E).to(self._device),
            sample_count=forest.sample_count,
            reference=self._known(forest.entry_reference_E),
            start=self._known(forest.entry_start_E),
            is_supervised=torch.from_numpy(is_supervised_E).to(self._device)
            if is_supervised_E.any()
            else None,
        )

    def _known(self, array: Floats) -> Tensor | None:
        """The values; None if there is none."""
        return None if np.isnan(array).all() else self._values(array)


def _array(values: Tensor) -> Floats:
    return np.asarray(values.detach().double().cpu().numpy())


def _run(forward: TreeForward, forest_loss: _ForestLoss, *, microbatch: Microbatch) -> EntryValues:
    if len(microbatch.blocks) == 1:
        return _run_whole(forward, forest_loss, recomputed_layers=microbatch.recomputed_layers)
    keys = forward.path_keys(microbatch.blocks, is_offloaded=microbatch.is_offloaded)
    return _run_in_blocks(forward, forest_loss, microbatch.blocks, keys)


def _run_whole(
    forward: TreeForward, forest_loss: _ForestLoss, *, recomputed_layers: int
) -> EntryValues:
    """Run all tokens forward and backward at once."""
    logprob_E, entropy_E = forward.whole(recomputed_layers=recomputed_layers)
    total, result = forest_loss.of(logprob_E)
    # A forest without entries has nothing to differentiate.
    if logprob_E.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    return forest_loss.values(logprob_E, entropy_E, total, result)


def _run_together(
    forward: TreeForward, forest_loss: _ForestLoss, *, run: LayoutRun, peers: Peers
) -> EntryValues:
    """Run this rank's ranges forward and backward, beside its team: one block at once."""
    keys = _team_keys(forward, run)
    if len(run.blocks) > 1:
        return _run_in_blocks(forward, forest_loss, run.blocks, keys, peers)
    (own,) = run.blocks
    edges = forward.edges(*own)
    hidden, logprob_J, logprob_E, entropy_E = forward.together(own, edges, keys, peers)
    owed_E, total, result = _owed(forest_loss, logprob_E)
    _backward(hidden, logprob_J, edges, owed_E)
    return forest_loss.values(logprob_E, entropy_E, total, result)


def _run_in_blocks(
    forward: TreeForward,
    forest_loss: _ForestLoss,
    blocks: Sequence[Range],
    keys: PathKeys,
    peers: Peers | None = None,
) -> EntryValues:
    """Run block by block: the same gradients, in the memory of one block and the carries.

    Of a team, `blocks` are this rank's ranges of them.
    """
    all_edges = [forward.edges(start, end) for start, end in blocks]
    logprob_E, entropy_E = forward.read(blocks, all_edges, keys, peers)
    owed_E, total, result = _owed(forest_loss, logprob_E)
    keys.start_backward()
    # In reverse: when a block runs backward, all queries that see its keys have added to their
    # gradients.
    for number, (start, end) in reversed(list(enumerate(blocks))):
        edges = all_edges[number]
        hidden = forward.block_hidden(number, start, end, keys=keys)
        logprob_J, _ = forward.logprobs(hidden, edges, start=start)
        _backward(hidden, logprob_J, edges, owed_E)
    return forest_loss.values(logprob_E, entropy_E, total, result)


def _owed(forest_loss: _ForestLoss, logprob_E: Tensor) -> tuple[Tensor, Tensor, EntryLoss]:
    """The loss's gradient for each log-probability, its sum, and the loss of each entry.

    The loss may couple entries of different blocks (GSPO does), so its gradient is taken once over
    all log-probabilities, and each block's backward starts from its share of that.
    """
    logprob_E.requires_grad_()
    total, result = forest_loss.of(logprob_E)
    (owed_E,) = torch.autograd.grad(total, logprob_E)
    return owed_E, total, result


def _backward(hidden: Tensor, logprob_J: Tensor, edges: Edges, owed_E: Tensor) -> None:
    """Run a block backward from what its edges owe.

    A block without edges still owes gradients to its keys, from later blocks: backward has to pass
    through its hidden states, hence their gradient of zeros.
    """
    owed_J = torch.zeros_like(logprob_J)
    owed_J.index_add_(0, edges.edge_of_entry_E, owed_E[edges.entry_E])
    torch.autograd.backward([logprob_J, hidden], [owed_J, torch.zeros_like(hidden)])
