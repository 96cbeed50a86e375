"""Layouts of a step's groups side by side, as the planner measures them: costs and depths.

The planner asks for thousands of layouts, each of some groups and cut in some way. So nothing is
joined: arrays hold every forest of the step once, and a layout says where its groups lie in them.
Costs are added up from the first token on, so those of a range are a difference.

N tokens of the step, each forest once; G groups of a layout, K blocks of it, R ranks of a team.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgemq_trainer.core.flops import Flops, forward_shares
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.path_counts import PathCounts
from forgemq_trainer.core.token_flops import token_flops
from forgemq_trainer.core.tree import Floats, Forest, Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The tokens of all forests of a step, one forest after the other.

    Attributes:
        weights: FLOPs of a token in the layers' products.
        attention_N: FLOPs of the attention of all tokens before each, and last of all tokens.
        head_N: The same of the head.
        draft_N: The same of a draft head.
        draft_read_N: The same of a draft head's forward alone.
        whole_N: The same of everything; whole numbers below 2**63.
        depth_N: Of each token; and last a 0.
    """

    weights: int
    attention_N: Integers
    head_N: Integers
    draft_N: Integers
    draft_read_N: Integers
    whole_N: Integers
    depth_N: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFlops:
    """FLOPs of each range of a layout, with those of a draft head.

    Attributes:
        trained_KR: Of a forward and backward.
        read_KR: Of a forward alone.
    """

    trained_KR: Floats
    read_KR: Floats


class StepLayouts:
    """All layouts of a step's forests."""

    def __init__(self, forests: Sequence[Forest], *, shape: ModelShape) -> None:
        """Count the FLOPs of each token."""
        self._shape = shape
        different = {id(forest): forest for forest in forests}
        counted = [token_flops(shape, forest) for forest in different.values()]
        counts = [forest.token_count for forest in different.values()]
        bounds: list[int] = np.cumsum([0, *counts]).tolist()
        firsts = dict(zip(different, bounds, strict=False))
        self._first = [firsts[id(forest)] for forest in forests]
        self._count = [forest.token_count for forest in forests]
        weights = counted[0].weights if counted else 0
        attention_N = _before([each.attention_N for each in counted])
        head_N = _before([each.head_N for each in counted])
        draft_N = _before([each.draft.trained_N for each in counted])
        self._tokens = StepTokens(
            weights=weights,
            attention_N=attention_N,
            head_N=head_N,
            draft_N=draft_N,
            draft_read_N=_before([each.draft.read_N for each in counted]),
            whole_N=weights * np.arange(len(head_N)) + attention_N + head_N + draft_N,
            depth_N=np.concatenate([*(f.position_N for f in different.values()), [0]]),
        )

    def place(self, group: int) -> int:
        """Where a group's forest begins in the step; the same for groups that share a forest."""
        return self._first[group]

    def layout(self, groups: Sequence[int]) -> "Layout":
        """Of these groups, in this order."""
        return Layout(
            self._tokens,
            first_G=np.array([self._first[group] for group in groups]),
            count_G=np.array([self._count[group] for group in groups]),
            shape=self._shape,
        )


class Layout:
    """Some groups, at least one, side by side."""

    def __init__(
        self, tokens: StepTokens, *, first_G: Integers, count_G: Integers, shape: ModelShape
    ) -> None:
        """Look at groups of `count_G` tokens, which begin at `first_G` in the step."""
        self._step, self._shape = tokens, shape
        self._first_G, self._last_G = first_G, first_G + count_G
        self._offset_G = np.cumsum(count_G) - count_G
        self.token_count = int(count_G.sum())

    def flops(self) -> Flops:
        """Of a forward and backward of all tokens, without a draft head's."""
        step = self._step
        return Flops(
            weights=float(step.weights * self.token_count),
            attention=float(self._of_groups(step.attention_N).sum()),
            head=float(self._of_groups(step.head_N).sum()),
        )

    def cut(self, *, blocks: int, ranks: int) -> Integers:
        """First tokens of ranges: even blocks by tokens, each in contiguous ranges of even cost.

        Args:
            blocks: K, at most as many as there are tokens.
            ranks: R, at most as many as the shortest block has tokens; each range has one or more.

        Returns:
            By block and rank.
        """
        bounds = self.token_count * np.arange(blocks + 1) // blocks
        start_K1, end_K1 = bounds[:-1, None], bounds[1:, None]
        before = self._costs_before(self._step.whole_N, bounds)
        cost_K1 = np.diff(before)[:, None]
        parts = np.arange(1, ranks)
        # cost * part // ranks, whose product might not fit 64 bits.
        share = cost_K1 // ranks * parts + cost_K1 % ranks * parts // ranks
        cuts = self._first_with(before[:-1, None] + share) - parts
        # A range has a token or more: its first one lies a place or more behind the one before,
        # and each range from there on needs a place too.
        starts_KR = np.maximum.accumulate(np.append(start_K1, cuts, axis=1), axis=1)
        return np.asarray(np.minimum(starts_KR, end_K1 - ranks) + np.arange(ranks))

    def lengths(self, starts_KR: Integers) -> Integers:
        """Tokens of ranges that begin here, each of which ends where the next one begins."""
        return np.diff(starts_KR.reshape(-1), append=self.token_count).reshape(starts_KR.shape)

    def range_flops(self, starts_KR: Integers) -> RangeFlops:
        """Of these ranges, as in `lengths`.

        The forward of a draft head that blocks run once more comes after the policy's last pass;
        it counts in the pass of the same block in which the policy is read.
        """
        step, bounds = self._step, np.append(starts_KR, self.token_count)
        shares = forward_shares(self._shape)
        weights = (step.weights * np.diff(bounds)).astype(np.float64)
        attention = self._costs_between(step.attention_N, bounds)
        head = self._costs_between(step.head_N, bounds)
        trained = weights + attention + head
        read = weights * shares.weights + attention * shares.attention + head * shares.head
        if self._shape.draft is not None:
            trained += self._costs_between(step.draft_N, bounds)
            read += self._costs_between(step.draft_read_N, bounds)
        return RangeFlops(
            trained_KR=trained.reshape(starts_KR.shape), read_KR=read.reshape(starts_KR.shape)
        )

    def path_counts(self, starts_KR: Integers) -> PathCounts:
        """Of these ranges, as in `lengths`."""
        starts = starts_KR.reshape(-1)
        lasts = np.append(starts[1:], self.token_count) - 1
        first, last = self._places(starts), self._places(lasts)
        # Where a range has tokens of several groups, one is a root.
        is_in_one = self._group_of(starts) == self._group_of(lasts)
        ends = np.where(is_in_one, last, first) + 1
        # `reduceat` takes the ranges, and what lies between them, which is dropped.
        pairs = np.stack([first, ends], axis=1).reshape(-1)
        least = np.minimum.reduceat(self._step.depth_N[: ends.max() + 1], pairs)[::2] * is_in_one
        depth = self._step.depth_N[first]
        return PathCounts(depth.reshape(starts_KR.shape), least.reshape(starts_KR.shape))

    def _of_groups(self, before_N: Integers) -> Integers:
        """Costs of each group, from those before each token of the step."""
        return np.asarray(before_N[self._last_G] - before_N[self._first_G])

    def _costs_between(self, before_N: Integers, bounds: Integers) -> Floats:
        """Costs of this layout between each of these tokens, or its end, and the next."""
        return np.diff(self._costs_before(before_N, bounds)).astype(np.float64)

    def _costs_before(self, before_N: Integers, tokens: Integers) -> Integers:
        """Costs of this layout before these of its tokens, or before its end."""
        of_group_G = self._of_groups(before_N)
        before_G = np.cumsum(of_group_G) - of_group_G - before_N[self._first_G]
        return np.asarray(before_G[self._group_of(tokens)] + before_N[self._places(tokens)])

    def _first_with(self, costs: Integers) -> Integers:
        """The first token, or the end, before which these costs lie, which are above 0."""
        whole_N = self._step.whole_N
        of_group_G = self._of_groups(whole_N)
        before_G = np.cumsum(of_group_G) - of_group_G
        group = np.searchsorted(before_G, costs) - 1
        place = np.searchsorted(whole_N, costs - before_G[group] + whole_N[self._first_G[group]])
        return np.asarray(self._offset_G[group] + place - self._first_G[group])

    def _group_of(self, tokens: Integers) -> Integers:
        """Which group has each token of the layout; the end is the last one's."""
        return np.searchsorted(self._offset_G, tokens, side="right") - 1

    def _places(self, tokens: Integers) -> Integers:
        """Where these tokens of the layout lie in the step."""
        group = self._group_of(tokens)
        return np.asarray(self._first_G[group] + tokens - self._offset_G[group])


def _before(costs: Sequence[Integers]) -> Integers:
    """The sum of all costs before each, and of all."""
    return np.cumsum(np.concatenate([[0], *costs]), dtype=np.int64)
