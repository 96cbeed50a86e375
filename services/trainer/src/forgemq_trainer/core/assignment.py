"""Which ranks train what, in which round: a pure function of the step's trees and of the ranks.

Each rank holds shards of the parameters, so all ranks must gather them equally often and in the
same order. A step is therefore a list of rounds that every rank goes through. In a round, teams
of ranks run side by side, each with groups of its own: a team of one rank runs them by itself, a
larger one cuts their layout into a range of queries for each of its ranks. All teams of a round
have the same number of blocks K: one forward and backward if K is 1; else K forwards without
gradient, then K forwards and backwards in reverse. A rank without a team runs as many empty blocks.

Groups are spread over few rounds by cost, and within a round over halves of the ranks, halves of
those and so on, as long as no rank gets more than `IMBALANCE_MAX` even shares. So teams are as
small as balance allows, and a group that costs more than a rank's share gets several ranks. Groups
that fit no rank and no team at once run in blocks, in rounds of their own.

A round lasts as long as its costliest rank in each pass; costs are FLOPs (`token_flops`).

If tokens travel to experts on other ranks, a rank computes rows of all, and its budget counts those
of the rank with most tokens, beside keys and activations of its own (`TeamPlans.beside`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.flops import gathered_weights, layer_weights
from forgemq_trainer.core.memory import BLOCK_TOKENS_MIN, ModelShape
from forgemq_trainer.core.team_plans import Team, TeamPlans
from forgemq_trainer.core.tree import Forest

IMBALANCE_MAX = 1.05
"""Smaller teams hand over fewer keys, and are taken unless their costliest rank has more than so
many even shares of the round. So a round that is cut this way idles for at most 5 %."""

ROUND_CHOICES = 4
"""So many numbers of rounds are compared, from the fewest that fit on: with more rounds fewer
layers may have to be recomputed."""

PASS_FLOPS_PER_WEIGHT = 3000
"""What a pass counts besides its own FLOPs, for it gathers all weights of the layers. In bfloat16 a
weight has 2 bytes; in the time in which a link of a few 100 GB/s brings a byte, a GPU does 1,000 to
2,000 operations."""

HANDOVER_TOKENS = 64
"""A pass in which a team of several ranks hands over keys counts as much as the layers' products of
so many tokens more: each layer waits for that once forward and once backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Teams side by side, with the same number of blocks; a rank in no team runs empty ones.

    Attributes:
        teams: At least one, each of ranks that no other has, in their order.
    """

    teams: tuple[Team, ...]

    @property
    def block_count(self) -> int:
        """Of every team."""
        return len(self.teams[0].blocks)

    @property
    def recomputed_layers(self) -> int:
        """The most of a team."""
        return max(team.recomputed_layers for team in self.teams)

    @property
    def slowest(self) -> tuple[float, ...]:
        """FLOPs of the costliest rank in each pass, for which all ranks wait."""
        passes = zip(*(team.flops for team in self.teams), strict=True)
        return tuple(max(itertools.chain(*teams)) for teams in passes)

    def team_of(self, rank: int) -> Team | None:
        """The team that a rank is in; None if it has nothing to train in this round."""
        return next((t for t in self.teams if t.ranks[0] <= rank < t.ranks[1]), None)


def idle_share(rounds: Sequence[Round], *, world_size: int) -> float:
    """The share of all ranks' time in which they wait for the costliest rank of a pass.

    By FLOPs, with those of recomputed layers and of the further forward of blocks; communication is
    left out.
    """
    waited = world_size * sum(sum(each.slowest) for each in rounds)
    worked = sum(
        flops for each in rounds for team in each.teams for flops in itertools.chain(*team.flops)
    )
    return 1 - worked / waited if waited else 0.0


def plan_rounds(
    forests: Sequence[Forest],
    *,
    shape: ModelShape,
    world_size: int,
    budget_bytes: int,
    head_chunk: int,
) -> tuple[Round, ...]:
    """The rounds of a step over these forests; as `rounds_of`, whose plans are made here."""
    plans = TeamPlans(forests, shape=shape, budget_bytes=budget_bytes, head_chunk=head_chunk)
    return rounds_of(plans, world_size=world_size)


def rounds_of(plans: TeamPlans, *, world_size: int) -> tuple[Round, ...]:
    """The rounds of a step, the same on every rank.

    Example: two ranks and groups of cost 5, 3 and 2: rank 0 runs the first, rank 1 the other two.
    With groups of cost 6, 1 and 1 both ranks together run all three, a half each.

    Raises:
        ValueError: the budget is below the least that a group needs.
    """
    search = _Search(plans, world_size=world_size)
    # A group without entries has no loss, hence no gradient.
    trained = [group for group, forest in enumerate(plans.forests) if forest.entry_count]
    at_once = tuple(group for group in trained if search.round((group,), count=1) is not None)
    planned = []
    for groups in _choices(plans, at_once, world_size=world_size):
        others = [group for group in trained if group not in groups]
        in_blocks = search.in_blocks(others)
        if in_blocks is None:
            continue
        planned.append((*search.at_once(groups), *in_blocks))
    if not planned:
        refused = next(g for g in trained if g not in at_once and search.in_blocks((g,)) is None)
        raise ValueError(plans.refusal(refused))
    return search.best(planned)


def _choices(
    plans: TeamPlans, at_once: tuple[int, ...], *, world_size: int
) -> list[tuple[int, ...]]:
    """Which of the groups that fit at once are to run so: all; or of those recomputed fewer.

    Recomputed, each takes a rank of its own. Blocks on several ranks may take less time than ranks
    that wait for a costlier one. So the cheapest are tried, as many as fill all ranks an equal
    number of times, once less often, and none.
    """
    kept = [group for group in at_once if plans.is_kept(group)]
    recomputed = sorted(set(at_once) - set(kept), key=lambda group: (plans.cost(group), group))
    even = len(recomputed) // world_size * world_size
    counts = sorted({len(recomputed), even, max(0, even - world_size), 0}, reverse=True)
    return [tuple(sorted([*kept, *recomputed[:count]])) for count in counts]


def balanced(
    groups: Sequence[int], *, costs: Mapping[int, float], shares: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The groups in parts, each ascending, of costs about in proportion to the shares.

    The costliest group goes first, each to the part that is then the least full for its share.
    """
    loads = [0.0] * len(shares)
    parts: list[list[int]] = [[] for _ in shares]
    for group in sorted(groups, key=lambda group: (-costs[group], group)):
        filled = [(load + costs[group]) / share for load, share in zip(loads, shares, strict=True)]
        part = filled.index(min(filled))
        parts[part].append(group)
        loads[part] += costs[group]
    return tuple(tuple(sorted(part)) for part in parts)


def team_ranks(world_size: int) -> Iterator[Range]:
    """All ranks that may form a team of at least two: all, their halves, the halves of those."""

    def below(ranks: Range) -> Iterator[Range]:
        if ranks[1] - ranks[0] > 1:
            yield ranks
            for half in _halves(ranks):
                yield from below(half)

    return below((0, world_size))


def _halves(ranks: Range) -> tuple[Range, Range]:
    middle = (ranks[0] + ranks[1]) // 2
    return (ranks[0], middle), (middle, ranks[1])


class _Search:
    """Looks for the rounds of the least duration."""

    def __init__(self, plans: TeamPlans, *, world_size: int) -> None:
        """Know the ranks, and the shape that decides what a pass costs."""
        self._plans = plans
        self._shape = plans.shape
        self._world_size = world_size

    def best(self, choices: Sequence[tuple[Round, ...]]) -> tuple[Round, ...]:
        """The first of the least duration: FLOPs for which all ranks wait, passes, handovers."""
        return min(choices, key=lambda rounds: sum(map(self._duration, rounds)))

    def _duration(self, planned: Round) -> float:
        of_pass = PASS_FLOPS_PER_WEIGHT * gathered_weights(self._shape)
        if any(team.size > 1 for team in planned.teams):
            of_pass += HANDOVER_TOKENS * 6 * layer_weights(self._shape)
        return sum(planned.slowest) + of_pass * len(planned.slowest)

    def round(self, groups: tuple[int, ...], *, count: int) -> Round | None:
        """The groups in one round, in so many blocks; None if they do not fit."""
        whole = sum(self._plans.cost(group, is_read=count > 1) for group in groups)
        limit = IMBALANCE_MAX * whole / self._world_size
        teams = self._teams((0, self._world_size), groups, count=count, limit=limit)
        return None if teams is None else Round(teams=teams)

    def at_once(self, groups: tuple[int, ...]) -> tuple[Round, ...]:
        """Groups that fit at once, in few rounds of one block."""
        choices: list[tuple[Round, ...]] = []
        for count in range(1, len(groups) + 1):
            choices.extend(self._spread(groups, count, self._at_once))
            if len({len(rounds) for rounds in choices}) == ROUND_CHOICES:
                break
        return self.best(choices) if choices else ()

    def in_blocks(self, groups: Sequence[int]) -> tuple[Round, ...] | None:
        """Groups in rounds of several blocks, as few as fit; None if one does not fit so."""
        choices: list[tuple[Round, ...]] = [] if groups else [()]
        count = 1
        while groups and count < 2 * len(groups):
            choices.extend(self._spread(groups, min(count, len(groups)), self._in_fewest_blocks))
            count *= 2
        return self.best(choices) if choices else None

    def _spread(
        self,
        groups: Sequence[int],
        count: int,
        round_of: Callable[[tuple[int, ...]], Round | None],
    ) -> Iterator[tuple[Round, ...]]:
        """The groups in so many rounds: of about equal cost, and of groups of similar cost.

        The latter is better if most groups take a rank of their own. What does not fit is left out.
        """
        costs = {group: self._plans.cost(group) for group in groups}
        ordered = sorted(groups, key=lambda group: (-costs[group], group))
        size = -(-len(ordered) // count)
        alike = [tuple(sorted(ordered[n : n + size])) for n in range(0, len(ordered), size)]
        for parts in (balanced(groups, costs=costs, shares=[1] * count), alike):
            rounds: list[Round] = []
            for part in parts:
                planned = round_of(part)
                if planned is None:
                    break
                rounds.append(planned)
            if len(rounds) == len(parts):
                yield tuple(rounds)

    def _at_once(self, groups: tuple[int, ...]) -> Round | None:
        return self.round(groups, count=1)

    def _in_fewest_blocks(self, groups: tuple[int, ...]) -> Round | None:
        tokens = self._plans.tokens(groups)
        count, last = 1, math.ceil(tokens / BLOCK_TOKENS_MIN)
        while count < last:
            # By an eighth at a time: a large tree has thousands of choices.
            count = min(last, count + 1 + count // 8)
            if not self._plans.may_fit(tokens, ranges=count * self._world_size):
                continue
            planned = self.round(groups, count=count)
            if planned is not None:
                return planned
        return None

    def _teams(
        self, ranks: Range, groups: tuple[int, ...], *, count: int, limit: float
    ) -> tuple[Team, ...] | None:
        """Teams of these ranks with all of these groups; None if they do not fit."""
        if not groups:
            return ()
        if ranks[1] - ranks[0] == 1:
            team = self._plans.team(ranks, groups, count=count)
            return None if team is None else (team,)
        apart = self._apart(ranks, groups, count=count, limit=limit)
        is_all = ranks == (0, self._world_size)
        if is_all and apart is not None and self._shape.expert_ranks > 1:
            apart = self._plans.beside(apart)
        if apart is not None and _longest(apart) <= limit:
            return apart
        together = self._plans.team(ranks, groups, count=count)
        if together is None or (apart is not None and _longest(apart) <= _longest((together,))):
            return apart
        return (together,)

    def _apart(
        self, ranks: Range, groups: tuple[int, ...], *, count: int, limit: float
    ) -> tuple[Team, ...] | None:
        halves = _halves(ranks)
        costs = {group: self._plans.cost(group) for group in groups}
        parts = balanced(groups, costs=costs, shares=[end - start for start, end in halves])
        teams: list[Team] = []
        for half, part in zip(halves, parts, strict=True):
            of_half = self._teams(half, part, count=count, limit=limit)
            if of_half is None:
                return None
            teams.extend(of_half)
        return tuple(teams)


def _longest(teams: tuple[Team, ...]) -> float:
    return sum(Round(teams=teams).slowest)
