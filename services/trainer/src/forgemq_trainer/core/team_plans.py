"""How a team of ranks can train some groups: in what memory, and at what cost.

A team cuts the joint layout of its groups into blocks, and each block into one range of queries for
each of its ranks, of even cost. A rank holds the activations of its range and the keys, values and
their gradients of the range and of its path, as a rank alone does for a block of that length. A
rank alone in one block has no carries; its groups run whole, one with recomputed layers if it must.

N tokens of a layout.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.flops import forward_of
from forgemq_trainer.core.memory import BLOCK_TOKENS_MIN, Microbatch, ModelShape
from forgemq_trainer.core.microbatches import recomputed_microbatch
from forgemq_trainer.core.paths import path_of, path_ranges
from forgemq_trainer.core.token_flops import TokenFlops, side_by_side, token_flops
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

    def microbatch(self) -> Microbatch:
        """What the only rank of this team runs."""
        return Microbatch(
            groups=self.groups,
            blocks=tuple(own for (own,) in self.blocks),
            is_offloaded=self.is_offloaded,
            recomputed_layers=self.recomputed_layers,
            predicted_bytes=self.predicted_bytes,
        )


def query_ranges(cost_T: Integers, *, start: int, parts: int) -> tuple[Range, ...]:
    """Contiguous ranges of about equal cost, at least one token each.

    Args:
        cost_T: Cost of each token, at least `parts` tokens.
        start: Layout index of the first token.
        parts: Number of ranges.
    """
    count = len(cost_T)
    before_T = np.cumsum(cost_T) - cost_T
    whole = int(cost_T.sum())
    bounds = [0]
    for part in range(1, parts):
        cut = int(np.searchsorted(before_T, whole * part // parts))
        # At least one token for this range, and one for each range after it.
        bounds.append(min(max(cut, bounds[-1] + 1), count - parts + part))
    bounds.append(count)
    return tuple((start + a, start + b) for a, b in itertools.pairwise(bounds))


class TeamPlans:
    """How teams can train groups of one step; remembers each team that was asked for."""

    def __init__(
        self, forests: Sequence[Forest], *, shape: ModelShape, budget_bytes: int, head_chunk: int
    ) -> None:
        """Count each forest's FLOPs; the budget is that of a rank."""
        self._forests = forests
        self._shape = shape
        self._budget_bytes = budget_bytes
        self._head_chunk = head_chunk
        self._flops = [token_flops(shape, forest) for forest in forests]
        self._teams: dict[tuple[int, tuple[int, ...], int], Team | None] = {}
        self._costs = [
            flops.of(0, forest.token_count)
            for flops, forest in zip(self._flops, forests, strict=True)
        ]

    def cost(self, group: int, *, is_read: bool = False) -> float:
        """FLOPs of a group's forward and backward, and of a further forward if it is read first."""
        flops = self._costs[group]
        return flops.total + (forward_of(flops, self._shape).total if is_read else 0.0)

    def tokens(self, groups: Sequence[int]) -> int:
        """Of the groups' layout."""
        return sum(self._forests[group].token_count for group in groups)

    def is_kept(self, group: int) -> bool:
        """True if the group fits one rank at once without recomputing a layer."""
        team = self.team((0, 1), (group,), count=1)
        return team is not None and not team.recomputed_layers

    def team(self, ranks: Range, groups: tuple[int, ...], *, count: int) -> Team | None:
        """These ranks running these groups in so many blocks; None if that does not fit.

        Ranges are not cut shorter than `BLOCK_TOKENS_MIN` on average.
        """
        size = ranks[1] - ranks[0]
        key = size, groups, count
        if key not in self._teams:
            self._teams[key] = self._whole(groups) if size * count == 1 else self._cut(*key)
        team = self._teams[key]
        return None if team is None else replace(team, ranks=ranks)

    def _cut(self, size: int, groups: tuple[int, ...], count: int) -> Team | None:
        tokens = self.tokens(groups)
        if -(-tokens // (size * BLOCK_TOKENS_MIN)) < count or tokens < size * BLOCK_TOKENS_MIN:
            return None
        even = -(-tokens // (size * count))
        if self._live_bytes(even, slots=even) > self._budget_bytes:
            return None  # Ranges of even cost are no shorter.
        flops = side_by_side([self._flops[group] for group in groups])
        bounds = [tokens * number // count for number in range(count + 1)]
        blocks = tuple(
            query_ranges(flops.total_N[start:end], start=start, parts=size)
            for start, end in itertools.pairwise(bounds)
        )
        live, stored = self._bytes(groups, blocks)
        if live > self._budget_bytes:
            return None
        is_offloaded = live + stored > self._budget_bytes
        return Team(
            ranks=(0, size),
            groups=groups,
            blocks=blocks,
            is_offloaded=is_offloaded,
            predicted_bytes=live if is_offloaded else live + stored,
            flops=self._pass_flops(flops, blocks),
        )

    def alone(self, microbatch: Microbatch) -> Team:
        """The only rank of a trainer, running a microbatch."""
        flops = side_by_side([self._flops[group] for group in microbatch.groups])
        blocks = tuple((block,) for block in microbatch.blocks)
        passes = self._pass_flops(flops, blocks)
        if microbatch.recomputed_layers:
            # Of these layers' products; their attention's output is kept on most backends.
            forward = forward_of(flops.of(*microbatch.blocks[0]), self._shape)
            again = forward.weights * microbatch.recomputed_layers / self._shape.layers
            passes = ((passes[0][0] + again,),)
        return Team(
            ranks=(0, 1),
            groups=microbatch.groups,
            blocks=blocks,
            recomputed_layers=microbatch.recomputed_layers,
            is_offloaded=microbatch.is_offloaded,
            predicted_bytes=microbatch.predicted_bytes,
            flops=passes,
        )

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
        needed = self._shape.block_bytes(tokens, chunk=self._head_chunk, is_carried=False)
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
            self._forests[group],
            shape=self._shape,
            budget_bytes=self._budget_bytes,
            head_chunk=self._head_chunk,
        )

    def _live_bytes(self, tokens: int, *, slots: int) -> int:
        block = self._shape.block_bytes(tokens, chunk=self._head_chunk, is_carried=True)
        return block + self._shape.carry_bytes(slots)

    def _bytes(
        self, groups: tuple[int, ...], blocks: tuple[tuple[Range, ...], ...]
    ) -> tuple[int, int]:
        """The most that a rank holds in a pass, and the most that one stores between passes."""
        position_N = np.concatenate([self._forests[group].position_N for group in groups])
        ranges = [own for block in blocks for own in block]
        live = self._live_bytes(
            max(end - start for start, end in ranges),
            slots=max(int(position_N[start]) + end - start for start, end in ranges),
        )
        if live > self._budget_bytes:
            return live, 0
        shape = self._shape
        traded = max(self._traded(groups, block) for block in blocks)
        # Of one layer: what is handed over and what comes, and half of that while it is picked.
        live += 3 * traded * shape.key_size * shape.wide_bytes
        return live, self._stored(groups, blocks) * shape.key_bytes_per_token

    def _traded(self, groups: tuple[int, ...], block: tuple[Range, ...]) -> int:
        """The most tokens whose keys a rank hands over and gets while a block runs."""
        starts = [start for start, _ in block]
        moved = np.zeros(len(block), dtype=np.int64)
        for rank, start in enumerate(starts[1:], start=1):
            offset, forest = self._forest_at(groups, start)
            path = path_of(forest, start - offset) + offset
            path = path[np.searchsorted(path, starts[0]) :]
            owner = np.searchsorted(starts, path, side="right") - 1
            moved += np.bincount(owner, minlength=len(block))
            moved[rank] += len(path)
        return int(moved.max())

    def _forest_at(self, groups: tuple[int, ...], token: int) -> tuple[int, Forest]:
        """The group's forest that has a token of the layout, and where it begins."""
        offset = 0
        for group in groups:
            forest = self._forests[group]
            if token < offset + forest.token_count:
                return offset, forest
            offset += forest.token_count
        raise IndexError(f"a layout of {offset} tokens has no token {token}")

    def _stored(self, groups: tuple[int, ...], blocks: tuple[tuple[Range, ...], ...]) -> int:
        """The most tokens of one rank that lie on a later path, those of the last block apart."""
        if len(blocks) == 1:
            return 0
        starts = np.array([start for block in blocks for start, _ in block])
        before = [np.zeros(1, dtype=np.int64)]
        offset = 0
        for group in groups:
            forest = self._forests[group]
            is_on_path_N = np.zeros(forest.token_count, dtype=np.int64)
            own = starts[(starts >= offset) & (starts < offset + forest.token_count)] - offset
            for start, end in path_ranges(forest, own.tolist()):
                is_on_path_N[start:end] = 1
            before.append(is_on_path_N)
            offset += forest.token_count
        before_N = np.cumsum(np.concatenate(before))
        return max(
            sum(int(before_N[end] - before_N[start]) for start, end in ranges)
            for ranges in zip(*blocks[:-1], strict=True)
        )

    def _pass_flops(
        self, flops: TokenFlops, blocks: tuple[tuple[Range, ...], ...]
    ) -> tuple[tuple[float, ...], ...]:
        """Of each pass, in order: one if there is one block, else every block is read first."""
        of_blocks = [[flops.of(start, end) for start, end in block] for block in blocks]
        trained = tuple(tuple(own.total for own in block) for block in reversed(of_blocks))
        if len(blocks) == 1:
            return trained
        read = (tuple(forward_of(own, self._shape).total for own in block) for block in of_blocks)
        return (*read, *trained)
