"""What ranks of a Qwen3-30B-A3B send in a step, as docs/tree_training.md says it."""

import pytest

from forgemq_launcher.core.trainer_place import Memory, memory_budget_bytes
from forgemq_launcher.plan.episodes import EpisodeShape
from forgemq_launcher.plan.group_trees import usual_tree
from forgemq_launcher.plan.machines import GPUS
from forgemq_trainer.core.traffic import RankGrid, passes_of, plan_update
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model_config import model_config
from forgemq_trainer.model_sizes import gathered_values
from forgemq_trainer.plan import model_without_memory, shape_of
from tests.unit.recipes.planned_recipes import RECIPES, ROOT, run_of

EPISODES = 8


def _tree(tokens: int) -> Forest:
    """A group whose episodes share half of its tokens."""
    shape = EpisodeShape(turns=1, prompt=tokens // 2, sampled=tokens // 2 // EPISODES)
    return read_tree(usual_tree(shape, episodes=EPISODES))


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "tokens"), [(64, 4_000), (16, 40_000), (8, 67_584)])
def test_the_page_says_what_ranks_send(groups: int, tokens: int):
    run = run_of("qwen3-30b-a3b/maths.toml")
    config = model_config((RECIPES / "qwen3-30b-a3b/config.json").read_bytes())
    model, shape = model_without_memory(config), shape_of(config, run, device="cuda")
    page = (ROOT / "docs/tree_training.md").read_text()
    trees = [_tree(tokens)] * groups
    for shards, replicas in ((8, 1), (16, 1), (8, 2)):
        grid = RankGrid(shards=shards, replicas=replicas)
        values = gathered_values(model, shards=shards)
        budget = memory_budget_bytes(
            Memory(free_bytes=GPUS["h200"].memory_bytes, parameters=values.total),
            device="cuda",
            ranks=grid.ranks,
            shard_ranks=shards,
            dtype="bfloat16",
            usual_bytes=0,
        )
        plan = plan_update(
            trees,
            shape=shape,
            values=values,
            grid=grid,
            budget_bytes=budget,
            head_chunk=run.trainer.head_chunk_tokens,
        )
        passes, sent = passes_of(plan.rounds), plan.traffic
        moved = (sent.gathered, sent.reduced, sent.replicated, sent.exchanged)
        gigabytes = " | ".join(f"{each / 1e9:,.0f}" for each in moved)
        row = (
            f"| {groups} of {tokens:,} | {replicas} x {shards} | {budget / 1e9:.1f} | "
            f"{passes.forwards}, {passes.backwards} | {plan.kept.name.lower()} | {gigabytes} |"
        )
        assert row in page, row
