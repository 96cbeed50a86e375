"""How long do ranks wait for one another in the plan of a step, and how long is it planned?

Plans steps over the trees of `tree_workloads` for 2, 4 and 8 ranks, and adds up what each rank
computes in each pass, by FLOPs. Nothing is trained: a plan is a function of the trees and of the
model's shape. Three models and budgets: that of `tree_training` with room for every tree, and
Qwen3-8B with 50 and 25 GB, in which most trees fit no rank with everything kept.

A case is a step of one tree, or of all of them. Rows of a case:

- idle_R: the share of R ranks' time in which they wait, in the first model;
- idle_R_50GB, idle_R_25GB: the same of Qwen3-8B;
- idle_max: the largest of these;
- idle_R_by_group: if each group ran on one rank, spread by cost, whatever memory that took.

The case `planning` is a step of 63 groups, nine of each shape, of Qwen3-8B with 25 GB on 8 and on
48 ranks, with what ranks keep between passes chosen too. Every rank of a trainer plans so. Rows:

- planning_R: CPU seconds of a plan;
- again_R: the share of them that the same trees take once more, with other log-probabilities.

`make load NAME=rank_plans JSON=plans.json`
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from measurement import Measurement, arguments
from tree_workloads import SHAPES, merged_tree, requests

from forgemq_trainer.core.assignment import balanced, idle_share, plan_rounds
from forgemq_trainer.core.flops import flops_of_tree
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.remembered_plans import RememberedPlans
from forgemq_trainer.core.traffic import GatheredValues, RankGrid, plan_update
from forgemq_trainer.core.tree import Forest, read_tree

QUESTION = (
    "How long do ranks wait for one another in the plan of a step, and how long is it planned?"
)
WORLD_SIZES = (2, 4, 8)
HEAD_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and the budget of a rank.

    Attributes:
        suffix: Of the names of its rows.
        shape: Of the model.
        budget_bytes: Of each rank.
    """

    suffix: str
    shape: ModelShape
    budget_bytes: int


SMALL = ModelShape(
    layers=2,
    hidden=512,
    query_size=512,
    query_heads=8,
    key_size=256,
    mlp_size=1536,
    vocabulary=2048,
    value_bytes=4,
    wide_bytes=4,
)
"""Of the model of `tree_training`."""

QWEN3_8B = ModelShape(
    layers=36,
    hidden=4096,
    query_size=4096,
    query_heads=32,
    key_size=1024,
    mlp_size=12288,
    vocabulary=151_936,
    value_bytes=2,
    wide_bytes=4,
    slot_multiple=256,
)
"""In bfloat16, on a GPU."""

QWEN3_8B_VALUES = GatheredValues(
    layers=6_946_000_000, root=622_000_000, head=622_000_000, trained=8_190_000_000
)
"""To three or four digits."""

PLANNING = "planning"
PLANNED_RANKS = (8, 48)
GROUPS_OF_SHAPE = 9

SETTINGS = (
    Setting(suffix="", shape=SMALL, budget_bytes=8 * 10**9),
    Setting(suffix="_50GB", shape=QWEN3_8B, budget_bytes=50 * 10**9),
    Setting(suffix="_25GB", shape=QWEN3_8B, budget_bytes=25 * 10**9),
)


def steps() -> Mapping[str, tuple[Forest, ...]]:
    """The trees of each step, by case."""
    trees = {name: read_tree(merged_tree(requests(shape))) for name, shape in SHAPES.items()}
    return {name: (tree,) for name, tree in trees.items()} | {"all": tuple(trees.values())}


def planned_idle_share(forests: Sequence[Forest], setting: Setting, *, world_size: int) -> float:
    """Of the plan of a step."""
    rounds = plan_rounds(
        forests,
        shape=setting.shape,
        world_size=world_size,
        budget_bytes=setting.budget_bytes,
        head_chunk=HEAD_CHUNK,
    )
    return idle_share(rounds, world_size=world_size)


def idle_share_by_group(forests: Sequence[Forest], shape: ModelShape, *, world_size: int) -> float:
    """Of whole groups on single ranks."""
    costs = {number: flops_of_tree(shape, forest).total for number, forest in enumerate(forests)}
    parts = balanced(list(costs), costs=costs, shares=[1] * world_size)
    slowest = max(sum(costs[group] for group in part) for part in parts)
    return 1 - sum(costs.values()) / (world_size * slowest)


def measure(measurement: Measurement, case: str, forests: Sequence[Forest]) -> None:
    """Plan one case for all models and numbers of ranks."""
    shares = []
    for setting in SETTINGS:
        for world_size in WORLD_SIZES:
            share = planned_idle_share(forests, setting, world_size=world_size)
            measurement.row(case, f"idle_{world_size}{setting.suffix}", share, "share")
            shares.append(share)
    measurement.row(case, "idle_max", max(shares), "share")
    for world_size in WORLD_SIZES:
        share = idle_share_by_group(forests, SMALL, world_size=world_size)
        measurement.row(case, f"idle_{world_size}_by_group", share, "share")


def different_groups() -> list[Forest]:
    """Of each shape some groups, no two of the same size."""
    shapes = [
        replace(
            shape,
            prompt=shape.prompt + 37 * number,
            rollouts=shape.rollouts - number % 4,
            turns=shape.turns + number % 3,
        )
        for number in range(GROUPS_OF_SHAPE)
        for shape in SHAPES.values()
    ]
    return [read_tree(merged_tree(requests(shape))) for shape in shapes]


def measure_planning(measurement: Measurement) -> None:
    """Plan many groups on many ranks in little memory, and the same trees once more."""
    forests = different_groups()
    others = [replace(each, entry_logprob_E=each.entry_logprob_E - 1) for each in forests]
    for ranks in PLANNED_RANKS:
        plan = partial(
            plan_update,
            shape=QWEN3_8B,
            values=QWEN3_8B_VALUES,
            grid=RankGrid(shards=ranks, replicas=1),
            budget_bytes=25 * 10**9,
            head_chunk=HEAD_CHUNK,
        )
        plans = RememberedPlans(plan)
        first_s, again_s = (_cpu_s(plans, trees) for trees in (forests, others))
        measurement.row(PLANNING, f"planning_{ranks}", first_s, "s")
        measurement.row(PLANNING, f"again_{ranks}", again_s / first_s, "share")


def _cpu_s(plans: RememberedPlans, forests: Sequence[Forest]) -> float:
    started_s = time.process_time()
    plans.of(forests)
    return time.process_time() - started_s


def main() -> int:
    """Plan every case."""
    options = arguments(QUESTION)
    measurement = Measurement(name="rank_plans", question=QUESTION)
    of_case = steps()
    for case in options.case or (*of_case, PLANNING):
        if case == PLANNING:
            measure_planning(measurement)
        else:
            measure(measurement, case, of_case[case])
    return measurement.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
