"""Teams of ranks for tests, whatever the planner would choose."""

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from forgemq_trainer.core.assignment import Round
from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.team_plans import Team
from forgemq_trainer.core.tree import Forest, Integers, read_tree
from tests.unit.trainer.scene import adversarial_samples, agent_samples, merge, routed


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


def forests_of_teams(kind: str = "qwen3") -> list[Forest]:
    """Groups of about 220, 14, 270 and 220 tokens."""
    generator = np.random.default_rng(3)
    samples = [
        agent_samples(generator, rollouts=5, turns=5),
        adversarial_samples(generator),
        agent_samples(generator, rollouts=6, turns=4, is_stripped=True),
        agent_samples(generator, rollouts=5, turns=4),
    ]
    trees = [merge(each, f"g-{number}") for number, each in enumerate(samples)]
    if kind == "qwen3_moe":
        trees = [routed(tree, layers=2, top_k=2, experts=4) for tree in trees]
    return [read_tree(tree) for tree in trees]


def rounds_of_teams(forests: Sequence[Forest], world: int) -> tuple[Round, ...]:
    """Of three or four ranks: a team of some beside one of others, and one of all; in one block
    and in several."""
    team = partial(team_of, forests)
    if world == 3:
        return (
            Round(teams=(team((0, 1), (1,)), team((1, 3), (0, 3)))),
            Round(teams=(team((0, 3), (2,), blocks=5, is_offloaded=True),)),
        )
    two = team((0, 2), (0, 1), blocks=4, is_offloaded=True)
    return (
        Round(teams=(two, team((2, 4), (2,), blocks=4))),
        Round(teams=(team((0, 4), (3,)),)),
    )
