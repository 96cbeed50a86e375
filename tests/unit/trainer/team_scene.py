"""Teams of ranks for tests, whatever the planner would choose."""

import itertools
from collections.abc import Sequence

import numpy as np

from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.team_plans import Team, query_ranges
from forgemq_trainer.core.tree import Forest


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
