"""How long do ranks wait for one another in the plan of a step?

Plans steps over the trees of `tree_workloads` for 2, 4 and 8 ranks, and adds up what each rank
computes in each pass, by FLOPs. Nothing is trained: a plan is a function of the trees and of the
model's shape. Three models and budgets: that of `tree_training` with room for every tree, and
Qwen3-8B with 50 and 25 GB, in which most trees fit no rank with everything kept.

A case is a step of one tree, or of all of them. Rows of a case:

- idle_R: the share of R ranks' time in which they wait, in the first model;
- idle_R_50GB, idle_R_25GB: the same of Qwen3-8B;
- idle_max: the largest of these;
- idle_R_by_group: if each group ran on one rank, spread by cost, whatever memory that took.

`make load NAME=rank_plans JSON=plans.json`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from measurement import Measurement, arguments
from tree_workloads import SHAPES, merged_tree, requests

from forgemq_trainer.core.assignment import balanced, idle_share, plan_rounds
from forgemq_trainer.core.flops import flops_of_tree
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import Forest, read_tree

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


def main() -> int:
    """Plan every case."""
    options = arguments("How long do ranks wait for one another in the plan of a step?")
    measurement = Measurement(
        name="rank_plans",
        question="How long do ranks wait for one another in the plan of a step?",
    )
    of_case = steps()
    for case in options.case or of_case:
        measure(measurement, case, of_case[case])
    return measurement.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
