"""How a team of ranks can train some groups: in what memory, and at what cost.

A team cuts the layout of its groups into blocks, and each block into one range of queries for
each of its ranks, of even cost. A rank holds the activations of its range and the keys, values and
their gradients of the range and of its path, as a rank alone does for a block of that length. A
rank alone in one block has no carries; its groups run whole, one with recomputed layers if it must.

K blocks, R ranks.
"""

import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.flops import forward_of
from forgemq_trainer.core.layouts import Layout, RangeFlops, StepLayouts
from forgemq_trainer.core.memory import BLOCK_TOKENS_MIN, Microbatch, ModelShape
from forgemq_trainer.core.microbatches import budget_refusal, recomputed_microbatch
from forgemq_trainer.core.peak import most_bytes
from forgemq_trainer.core.tree import Forest, Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Ranks that run some groups together, side by side in one layout.

    Attributes:
        ranks: The first of them, and one past the last.
        groups: Indices into the step's forests, ascending.
        blocks: For each block of the groups' layout, in order, the ranks' query ranges, in order,
            of at least one token each.
        recomputed_layers: So many of the first layers run forward again in backward; 0 unless a
            rank alone runs one block.
        is_offloaded: True if keys and values off the live path go to the policy's offload store.
        predicted_bytes: The most that one of its ranks holds at once, without parameters and their
            gradients.
        flops: For each pass of the round, in order, the FLOPs of each rank.
    """

    ranks: Range
    groups: tuple[int, ...]
    blocks: tuple[tuple[Range, ...], ...]
    recomputed_layers: int = 0
    is_offloaded: bool = False
    predicted_bytes: int
    flops: tuple[tuple[float, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks[1] - self.ranks[0]

    @property
    def is_whole(self) -> bool:
        """True if a rank alone runs one block, hence without carries."""
        return self.size * len(self.blocks) == 1

    @property
    def longest(self) -> int:
        """Tokens of the longest range of a rank."""
        return max(end - start for start, end in itertools.chain(*self.blocks))

    def microbatch(self) -> Microbatch:
        """What the only rank of this team runs."""
        return Microbatch(
            groups=self.groups,
            blocks=tuple(own for (own,) in self.blocks),
            is_offloaded=self.is_offloaded,
            recomputed_layers=self.recomputed_layers,
            predicted_bytes=self.predicted_bytes,
        )


class TeamPlans:
    """How teams can train groups of one step; remembers each team that was asked for.

    Attributes:
        forests: Of the step, one for each group.
        shape: The model's.
    """

    def __init__(
        self, forests: Sequence[Forest], *, shape: ModelShape, budget_bytes: int, head_chunk: int
    ) -> None:
        """Count each forest's FLOPs; the budget is that of a rank."""
        self.forests = forests
        self.shape = shape
        self._budget_bytes = budget_bytes
        self._head_chunk = head_chunk
        self._layouts = StepLayouts(forests, shape=shape)
        start_11 = np.zeros((1, 1), dtype=np.int64)
        flops = [
            self._layouts.layout((group,)).range_flops(start_11) for group in range(len(forests))
        ]
        self._costs = [float(each.trained_KR.item()) for each in flops]
        self._reads = [float(each.read_KR.item()) for each in flops]
        self._carried_peaks = shape.peaks(head_chunk, is_carried=True)
        self._teams: dict[tuple[int, tuple[int, ...], int], Team | None] = {}

    def with_budget(self, budget_bytes: int) -> "TeamPlans":
        """The same step in another budget; no FLOPs are counted again."""
        other = copy(self)
        other._budget_bytes, other._teams = budget_bytes, {}
        return other

    def cost(self, group: int, *, is_read: bool = False) -> float:
        """FLOPs of a group's forward and backward, and of a further forward if it is read first."""
        return self._costs[group] + (self._reads[group] if is_read else 0.0)

    def tokens(self, groups: Sequence[int]) -> int:
        """Of the groups' layout."""
        return sum(self.forests[group].token_count for group in groups)

    def refusal(self, group: int) -> str:
        """Says which budget a group needs that has no plan in this one."""
        return budget_refusal(
            self.forests[group],
            shape=self.shape,
            budget_bytes=self._budget_bytes,
            head_chunk=self._head_chunk,
        )

    def is_kept(self, group: int) -> bool:
        """True if the group fits one rank at once without recomputing a layer."""
        team = self.team((0, 1), (group,), count=1)
        return team is not None and not team.recomputed_layers

    def team(self, ranks: Range, groups: tuple[int, ...], *, count: int) -> Team | None:
        """These ranks running these groups in so many blocks; None if that does not fit.

        Ranges are not cut shorter than `BLOCK_TOKENS_MIN` on average.
        """
        size = ranks[1] - ranks[0]
        # Groups that share a forest have the same teams.
        key = size, tuple(self._layouts.place(group) for group in groups), count
        if key not in self._teams:
            is_whole = size * count == 1
            self._teams[key] = self._whole(groups) if is_whole else self._cut(size, groups, count)
        team = self._teams[key]
        return None if team is None else replace(team, ranks=ranks, groups=groups)

    def may_fit(self, tokens: int, *, ranges: int) -> bool:
        """False if a rank has no room for the longest of so many ranges, however they are cut."""
        even = -(-tokens // ranges)
        return self._live_bytes(even, slots=even) <= self._budget_bytes

    def _cut(self, size: int, groups: tuple[int, ...], count: int) -> Team | None:
        tokens = self.tokens(groups)
        if -(-tokens // (size * BLOCK_TOKENS_MIN)) < count or tokens < size * BLOCK_TOKENS_MIN:
            return None
        if not self.may_fit(tokens, ranges=size * count):
            return None
        layout = self._layouts.layout(groups)
        starts_KR = layout.cut(blocks=count, ranks=size)
        live, stored = self._bytes(layout, starts_KR)
        if live > self._budget_bytes:
            return None
        is_offloaded = live + stored > self._budget_bytes
        bounds = [*starts_KR.reshape(-1).tolist(), tokens]
        ranges = tuple(itertools.pairwise(bounds))
        return Team(
            ranks=(0, size),
            groups=groups,
            blocks=tuple(ranges[first : first + size] for first in range(0, len(ranges), size)),
            is_offloaded=is_offloaded,
            predicted_bytes=live if is_offloaded else live + stored,
            flops=_pass_flops(layout.range_flops(starts_KR)),
        )

    def alone(self, microbatch: Microbatch) -> Team:
        """The only rank of a trainer, running a microbatch."""
        layout = self._layouts.layout(microbatch.groups)
        starts_K1 = np.array([[start] for start, _ in microbatch.blocks])
        passes = _pass_flops(layout.range_flops(starts_K1))
        if microbatch.recomputed_layers:
            # Of these layers' products; their attention's output is kept on most backends.
            forward = forward_of(layout.flops(), self.shape)
            again = forward.weights * microbatch.recomputed_layers / self.shape.layers
            passes = ((passes[0][0] + again,),)
        return Team(
            ranks=(0, 1),
            groups=microbatch.groups,
            blocks=tuple((block,) for block in microbatch.blocks),
            recomputed_layers=microbatch.recomputed_layers,
            is_offloaded=microbatch.is_offloaded,
            predicted_bytes=microbatch.predicted_bytes,
            flops=passes,
        )

    def beside(self, teams: Sequence[Team]) -> tuple[Team, ...] | None:
        """Teams of one round, if tokens travel to experts; None if a rank might exceed its budget.

        A rank computes experts for as many tokens as the longest range of the round has, beside
        keys and activations of its own. It counts as if its own range were that long. A layer that
        runs forward again sends tokens to their experts again, so all ranks recompute as many
        layers as the one with the most, and a team of several ranks recomputes none.
        """
        if all(team.is_whole for team in teams):
            return self.recomputing_alike(teams)
        if any(team.recomputed_layers for team in teams):
            return None
        longest = max(team.longest for team in teams)
        alike = tuple(self._computing_for(longest, team) for team in teams)
        fits = all(team.predicted_bytes <= self._budget_bytes for team in alike)
        return alike if fits else None

    def _computing_for(self, tokens: int, team: Team) -> Team:
        """The team whose ranks count as if their ranges had so many tokens."""
        peaks = self.shape.peaks(self._head_chunk, is_carried=not team.is_whole)
        more = most_bytes(peaks, tokens) - most_bytes(peaks, team.longest)
        return replace(team, predicted_bytes=team.predicted_bytes + more)

    def recomputing_alike(self, teams: Sequence[Team]) -> tuple[Team, ...]:
        """Ranks alone, in one block, each recomputing as many layers as the one with the most."""
        layers = max(team.recomputed_layers for team in teams)
        if layers == min(team.recomputed_layers for team in teams):
            return tuple(teams)
        alike = (replace(team.microbatch(), recomputed_layers=layers) for team in teams)
        return tuple(
            replace(self.alone(microbatch), ranks=team.ranks)
            for team, microbatch in zip(teams, alike, strict=True)
        )

    def _whole(self, groups: tuple[int, ...]) -> Team | None:
        tokens = self.tokens(groups)
        needed = self.shape.block_bytes(tokens, chunk=self._head_chunk, is_carried=False)
        whole: Microbatch | None = Microbatch(
            groups=groups, blocks=((0, tokens),), predicted_bytes=needed
        )
        if needed > self._budget_bytes:
            whole = self._recomputed(groups) if len(groups) == 1 else None
        return None if whole is None else self.alone(whole)

    def _recomputed(self, groups: tuple[int, ...]) -> Microbatch | None:
        (group,) = groups
        return recomputed_microbatch(
            group,
            self.forests[group],
            shape=self.shape,
            budget_bytes=self._budget_bytes,
            head_chunk=self._head_chunk,
        )

    def _live_bytes(self, tokens: int, *, slots: int) -> int:
        return most_bytes(self._carried_peaks, tokens) + self.shape.carry_bytes(slots)

    def _bytes(self, layout: Layout, starts_KR: Integers) -> tuple[int, int]:
        """The most that a rank holds in a pass, and the most that one stores between passes."""
        paths = layout.path_counts(starts_KR)
        length_KR = layout.lengths(starts_KR)
        live = self._live_bytes(int(length_KR.max()), slots=int((paths.depth_KR + length_KR).max()))
        if live > self._budget_bytes:
            return live, 0
        # Of one layer: what is handed over and what comes, and half of that while it is picked.
        live += 3 * paths.traded() * self.shape.traded_size * self.shape.wide_bytes
        return live, paths.stored() * self.shape.key_bytes_per_token


def _pass_flops(flops: RangeFlops) -> tuple[tuple[float, ...], ...]:
    """Of each pass, in order: one if there is one block, else every block is read first."""
    trained = tuple(tuple(block) for block in flops.trained_KR[::-1].tolist())
    if len(trained) == 1:
        return trained
    return (*(tuple(block) for block in flops.read_KR.tolist()), *trained)
