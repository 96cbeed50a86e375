"""Teams of ranks for tests, whatever the planner would choose."""

import itertools
from collections.abc import Sequence

import numpy as np

from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.team_plans import Team
from forgemq_trainer.core.tree import Forest, Integers


def team_of(
    forests: Sequence[Forest],
    ranks: Range,
    groups: tuple[int, ...],
    *,
    blocks: int = 1,
    recomputed_layers: int = 0,
    is_offloaded: bool = False,
) -> Team:
    """These ranks running these groups in so many even blocks, each cut by depth."""
    positions = np.concatenate([forests[group].position_N for group in groups])
    bounds = [len(positions) * number // blocks for number in range(blocks + 1)]
    return Team(
        ranks=ranks,
        groups=groups,
        blocks=tuple(
            query_ranges(positions[start:end] + 5, start=start, parts=ranks[1] - ranks[0])
            for start, end in itertools.pairwise(bounds)
        ),
        recomputed_layers=recomputed_layers,
        is_offloaded=is_offloaded,
        predicted_bytes=0,
        flops=(),
    )


def query_ranges(costs: Integers, *, start: int, parts: int) -> tuple[Range, ...]:
    """Contiguous ranges of about equal cost, at least one token each, from one token on."""
    count, whole = len(costs), int(costs.sum())
    before = np.cumsum(costs) - costs
    bounds = [0]
    for part in range(1, parts):
        cut = int(np.searchsorted(before, whole * part // parts))
        # At least one token for this range, and one for each range after it.
        bounds.append(min(max(cut, bounds[-1] + 1), count - parts + part))
    bounds.append(count)
    return tuple((start + a, start + b) for a, b in itertools.pairwise(bounds))
