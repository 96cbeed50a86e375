"""What ranks that hold shards send in a step, and what they keep gathered to send less.

A pure function of the step's rounds, the model's sizes and the ranks. R ranks train. Every S of
them hold the parameters once, in shards; there are M = R / S such replicas of the model.

In a pass forward, layers are gathered one after the other, the embedding with them and the head
after them. Backward gathers the layers once more, and sums gradients over the S ranks into shards.
The sums over the replicas are made once, in the last backward of an update. What a rank has room
for, it keeps between the passes of an update (`Kept`).

A draft head is whole on each rank. An update gathers for it the embedding and the head of the
policy, and sums its gradients over all ranks, each of which gets them whole; a team hands over its
keys, and the states that it reads, at each of its depths.

Of gathers and sums a rank sends as much as it receives, as in a ring of n ranks: of a gather, or of
a sum of which each gets a shard, (n - 1) / n of the whole; of a sum that each gets whole, twice
that. Keys that ranks of a team hand over go from one rank to another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from forgemq_trainer.core.assignment import Round, rounds_of
from forgemq_trainer.core.draft_traffic import draft_bytes
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.microbatches import KEPT_BLOCKS_RATIO
from forgemq_trainer.core.path_counts import path_counts
from forgemq_trainer.core.team_plans import Team, TeamPlans
from forgemq_trainer.core.tree import Forest

ABOUT_AS_LONG = 1.01
"""A plan that computes so many times as long as another one computes no more: teams differ."""


class Kept(IntEnum):
    """What a rank keeps between the passes of an update; each includes those before it."""

    NOTHING = 0
    HEAD = 1
    WEIGHTS = 2
    GRADIENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """How ranks hold a model.

    Attributes:
        shards: Ranks that hold the parameters once.
        replicas: Groups of so many ranks.
    """

    shards: int
    replicas: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.shards * self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredValues:
    """Values of the parameters, by when they are gathered; rows padded to equal shards.

    Attributes:
        layers: Of all layers.
        root: Of the decoder besides its layers: the embedding and the last norm.
        head: 0 if it is tied to the embedding.
        trained: Of all of these, those with gradients.
        experts: Of a rank's share of the experts that tokens travel to; no part of the others.
        trained_experts: The same if they have gradients, else 0.
        holders: Ranks that hold the same share.
        ends: Of the embedding, and of the head if it is not tied: what a draft head uses of them.
    """

    layers: int
    root: int
    head: int
    trained: int
    experts: int = 0
    trained_experts: int = 0
    holders: int = 1
    ends: int = 0

    @property
    def total(self) -> int:
        """That a rank holds when it has gathered all that it computes with."""
        return self.layers + self.root + self.head + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How often a rank goes through the model in some rounds.

    Attributes:
        forwards: With gradient and without.
        backwards: Each follows a forward with gradient.
    """

    forwards: int
    backwards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends.

    Attributes:
        gathered: Of shards of parameters, so that others hold them whole.
        reduced: Of gradients, to be summed into shards.
        replicated: Of summed shards, to be summed over the replicas, and of a draft head's
            gradients, over all ranks.
        exchanged: Of groups that a team runs together: keys, values, their gradients,
            log-probabilities, and states that a draft head reads.
    """

    gathered: int = 0
    reduced: int = 0
    replicated: int = 0
    exchanged: int = 0

    @property
    def total(self) -> int:
        """Sum of the four."""
        return self.gathered + self.reduced + self.replicated + self.exchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """How ranks compute the gradients of an update.

    Attributes:
        rounds: In order.
        kept: Between the passes of these rounds.
        traffic: Of a rank.
    """

    rounds: tuple[Round, ...]
    kept: Kept
    traffic: Traffic


def plan_update(
    forests: Sequence[Forest],
    *,
    shape: ModelShape,
    values: GatheredValues,
    grid: RankGrid,
    budget_bytes: int,
    head_chunk: int,
) -> UpdatePlan:
    """The plan that sends least, of those that compute no more to have room for what they keep.

    What is kept takes its bytes from the budget. Example: a model of 2 GB that runs three
    microbatches of 20 GB in a budget of 50 GB is gathered once. If a group were recomputed in 48 GB
    but not in 50, it would be gathered in every pass. Smaller microbatches compute no more, nor do
    up to `KEPT_BLOCKS_RATIO` times the blocks of a group in blocks.

    Args:
        forests: One for each group of the update.
        shape: The model's sizes.
        values: The model's parameters.
        grid: The ranks.
        budget_bytes: Of each rank.
        head_chunk: Rows of logits that exist at once.

    Raises:
        ValueError: the budget is below the least that a group needs.
    """
    plans = TeamPlans(forests, shape=shape, budget_bytes=budget_bytes, head_chunk=head_chunk)
    best: UpdatePlan | None = None
    usual: tuple[Round, ...] = ()
    rounds: tuple[Round, ...] = ()
    for kept in Kept:
        left_bytes = budget_bytes - kept_bytes(kept, values=values, shape=shape)
        # Rounds that fit what is left of the budget stay as they are: to plan takes seconds.
        if best is None or _most_bytes(rounds) > left_bytes:
            try:
                rounds = rounds_of(plans.with_budget(left_bytes), world_size=grid.ranks)
            except ValueError:
                if best is None:
                    raise
                return best
        plan = UpdatePlan(
            rounds=rounds,
            kept=kept,
            traffic=update_traffic(
                rounds, forests, shape=shape, values=values, grid=grid, kept=kept
            ),
        )
        if best is None:
            best, usual = plan, rounds
        elif not _computes_no_more(rounds, usual):
            return best
        elif plan.traffic.total < best.traffic.total:
            best = plan
    assert best is not None, "nothing kept is a plan, or an error"
    return best


def kept_bytes(kept: Kept, *, values: GatheredValues, shape: ModelShape) -> int:
    """Bytes of each rank for what it keeps, beside its shard."""
    weights = {Kept.NOTHING: 0, Kept.HEAD: values.head}.get(kept, values.total)
    gradients = values.trained + values.trained_experts if kept == Kept.GRADIENTS else 0
    return weights * shape.value_bytes + gradients * shape.wide_bytes


def passes_of(rounds: Sequence[Round]) -> Passes:
    """How often each rank goes through the model in these rounds."""
    counts = [planned.block_count for planned in rounds]
    # Before its backward, a group in blocks runs once without gradient.
    forwards = sum(2 * count if count > 1 else count for count in counts)
    return Passes(forwards=forwards, backwards=sum(counts))


def update_traffic(
    rounds: Sequence[Round],
    forests: Sequence[Forest],
    *,
    shape: ModelShape,
    values: GatheredValues,
    grid: RankGrid,
    kept: Kept,
    rank: int | None = None,
) -> Traffic:
    """What a rank sends for the gradients of an update; None is the one that hands over most."""
    passes = passes_of(rounds)
    if not passes.backwards:
        return Traffic()
    whole = _gathered_values(
        values,
        kept=kept,
        layers=passes.forwards + passes.backwards,
        root=passes.backwards,
        head=passes.forwards,
    )
    ends = values.ends if shape.draft else 0
    of_draft = shape.draft.parameters * shape.wide_bytes if shape.draft else 0
    gradients = values.trained * shape.wide_bytes
    reductions = 1 if kept >= Kept.GRADIENTS else passes.backwards
    return Traffic(
        gathered=_share((whole + ends) * shape.value_bytes, ranks=grid.shards)
        + _share(
            _expert_values(values, kept=kept, layers=passes.forwards + passes.backwards)
            * shape.value_bytes,
            ranks=values.holders,
        ),
        reduced=_share(reductions * gradients, ranks=grid.shards)
        + _share(reductions * values.trained_experts * shape.wide_bytes, ranks=values.holders),
        replicated=2
        * _share(_shard_values(values, grid=grid) * shape.wide_bytes, ranks=grid.replicas)
        + 2 * _share(of_draft, ranks=grid.ranks),
        exchanged=sum(
            exchanged_bytes(planned, forests, shape=shape, is_trained=True, rank=rank)
            for planned in rounds
        ),
    )


def reading_traffic(
    rounds: Sequence[Round],
    forests: Sequence[Forest],
    *,
    shape: ModelShape,
    values: GatheredValues,
    grid: RankGrid,
    kept: Kept,
    rank: int | None = None,
) -> Traffic:
    """What a rank sends to read log-probabilities, of the policy or of a reference.

    Without a rank it is the one that hands over most.
    """
    forwards = sum(planned.block_count for planned in rounds)
    whole = _gathered_values(values, kept=kept, layers=forwards, root=1, head=forwards)
    entries = sum(forest.entry_count for forest in forests)
    return Traffic(
        gathered=_share(whole * shape.value_bytes, ranks=grid.shards)
        + _share(
            _expert_values(values, kept=kept, layers=forwards) * shape.value_bytes,
            ranks=values.holders,
        )
        if forwards
        else 0,
        exchanged=2 * _share(entries * 8, ranks=grid.ranks)
        + sum(
            exchanged_bytes(planned, forests, shape=shape, is_trained=False, rank=rank)
            for planned in rounds
        ),
    )


def exchanged_bytes(
    planned: Round,
    forests: Sequence[Forest],
    *,
    shape: ModelShape,
    is_trained: bool,
    rank: int | None = None,
) -> int:
    """What a rank sends of the groups that teams run together; None is the one that sends most.

    At most so much with adapters: if none is on the first layer's keys and values, these have no
    gradients to send.
    """
    sent = {
        each: sent_bytes
        for team in planned.teams
        if team.size > 1
        for each, sent_bytes in _sent_bytes(team, forests, shape=shape, is_trained=is_trained)
    }
    return max(sent.values(), default=0) if rank is None else sent.get(rank, 0)


def _sent_bytes(
    team: Team, forests: Sequence[Forest], *, shape: ModelShape, is_trained: bool
) -> Iterator[tuple[int, int]]:
    """Of each rank of a team, keys, values and gradients handed over, and log-probabilities."""
    of_team = [forests[group] for group in team.groups]
    paths = path_counts(np.concatenate([each.position_N for each in of_team]), team.blocks)
    of_token = 2 * shape.layers * shape.key_size
    # Log-probabilities and entropies of all entries, each from one of the ranks.
    entries = sum(each.entry_count for each in of_team)
    of_entries = 2 * 2 * _share(entries * shape.wide_bytes, ranks=team.size)
    handed = zip(*paths.handed_over(is_trained=is_trained), strict=True)
    draft = shape.draft if is_trained else None
    of_draft = [0] * team.size if draft is None else draft_bytes(draft, of_team, team.blocks)
    for rank, (keys, gradients) in enumerate(handed):
        sent = of_token * (int(keys) * shape.value_bytes + int(gradients) * shape.wide_bytes)
        yield team.ranks[0] + rank, sent + of_entries + of_draft[rank]


def _gathered_values(
    values: GatheredValues, *, kept: Kept, layers: int, root: int, head: int
) -> int:
    """Values that are gathered if each part is gathered so often, unless it is kept."""
    if kept >= Kept.WEIGHTS:
        layers = root = 1
    if kept >= Kept.HEAD:
        head = 1
    return layers * values.layers + root * values.root + head * values.head


def _expert_values(values: GatheredValues, *, kept: Kept, layers: int) -> int:
    """The same of a rank's share of the experts."""
    return values.experts * (1 if kept >= Kept.WEIGHTS else layers)


def _shard_values(values: GatheredValues, *, grid: RankGrid) -> int:
    """Values with gradients in a rank's shard."""
    return values.trained // grid.shards + values.trained_experts // values.holders


def _share(whole: int, *, ranks: int) -> int:
    """What each of so many ranks sends of a gather of `whole`, or of its sum into shards."""
    return whole * (ranks - 1) // ranks


def _most_bytes(rounds: Sequence[Round]) -> int:
    """What a rank holds at once, of the rank and the round in which that is most."""
    return max((team.predicted_bytes for each in rounds for team in each.teams), default=0)


def _computes_no_more(rounds: Sequence[Round], usual: Sequence[Round]) -> bool:
    """True if ranks compute no longer than usually, and no block gets much shorter."""
    blocks, usual_blocks = _blocks_of_groups(rounds), _blocks_of_groups(usual)
    return _slowest(rounds) <= ABOUT_AS_LONG * _slowest(usual) and all(
        blocks[n] <= KEPT_BLOCKS_RATIO * usual_blocks[n] for n in blocks
    )


def _slowest(rounds: Sequence[Round]) -> float:
    """FLOPs of the costliest rank in each pass, for which all ranks wait."""
    return sum(sum(planned.slowest) for planned in rounds)


def _blocks_of_groups(rounds: Sequence[Round]) -> dict[int, int]:
    """By group, how many blocks follow one another."""
    return {
        group: planned.block_count
        for planned in rounds
        for team in planned.teams
        for group in team.groups
    }
