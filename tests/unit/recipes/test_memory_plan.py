"""The recipes' token budget and memory plan for the published models, from their config alone."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tree_workloads import Sample, merged_tree

from forgemq_contracts.mixture import staleness_bounds
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.trainer_place import Memory, memory_budget_bytes, trainer_device
from forgemq_trainer.core.assignment import plan_rounds
from forgemq_trainer.core.attention.gpu_attention import GpuAttention
from forgemq_trainer.core.memory import ModelShape, least_budget_bytes
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import DTYPES
from forgemq_trainer.model_sizes import model_shape
from tests.unit.recipes.recipe import RECIPES, config_of, parameters_of, run_of

GPUS = 8
GPU_FREE_BYTES = 80_000_000_000
"""Of a GPU that is sold as one of 80 GB: it has 80 to 85 times 10^9 bytes."""

GROUPS_OF_6 = ("queues.coding.group_size=6", "trainer.tree_tokens_max=80000")
PLANS = [
    ("maths.toml", "4B", ()),
    ("maths.toml", "8B", ("trainer.world_size=6", "log.lanes=2")),
    ("coding.toml", "4B", ()),
    ("coding.toml", "8B", GROUPS_OF_6),
]
"""Run file, model and overrides of each row of the README's table."""


def shape_of(run: RunConfiguration, size: str) -> ModelShape:
    config = config_of(size)
    shape = model_shape(config, dtype=DTYPES[run.model.dtype])
    return replace(shape, slot_multiple=GpuAttention(head_size=config.head_dim).slot_multiple)


def budget_of(run: RunConfiguration, size: str) -> int:
    """What `forgemq run` finds on GPUs of which nothing is taken."""
    return memory_budget_bytes(
        Memory(free_bytes=GPU_FREE_BYTES, parameters=parameters_of(size)),
        device="cuda",
        ranks=run.trainer.world_size,
        shard_ranks=run.trainer.world_size,
        dtype=run.model.dtype,
        usual_bytes=run.trainer.memory_budget_bytes,
    )


def largest_tree(run: RunConfiguration) -> Forest:
    """A group whose rollouts fill the context, and share as much as leaves the policy its tokens.

    In the coding recipe they share nothing: a turn's tokens bound a turn, and not an episode.
    """
    [queue] = run.queues
    context, sampled = run.model.context_tokens_max, run.episodes.sampling.max_tokens
    shared = context - sampled if queue.domain == "maths" else 0
    generator = np.random.default_rng(0)

    def drawn(count: int) -> np.ndarray:
        return generator.integers(1, 150_000, count, dtype=np.int32)

    prompt = drawn(shared)
    return read_tree(
        merged_tree(
            [
                Sample(
                    tokens=np.concatenate([prompt, drawn(context - shared)]),
                    sampled=np.arange(max(1, shared), context),
                    behaviour=np.full(context - max(1, shared), -1.0, np.float32),
                    advantage=1.0,
                    rollout=rollout,
                )
                for rollout in range(queue.group_size)
            ]
        )
    )


def tokens_at_once(run: RunConfiguration, size: str, tree: Forest) -> tuple[int, str]:
    """Tokens of the longest run in which this tree trains, and how it does, in words."""
    [planned] = plan_rounds(
        [tree],
        shape=shape_of(run, size),
        world_size=run.trainer.world_size,
        budget_bytes=budget_of(run, size),
        head_chunk=run.trainer.head_chunk_tokens,
    )
    (team,) = planned.teams
    if team.size > 1:
        tokens = max(end - start for block in team.blocks for start, end in block)
        blocks = f", in {len(team.blocks)} blocks" if len(team.blocks) > 1 else " at once"
        return tokens, f"by {team.size} ranks{blocks}, up to {tokens:,} tokens on each"
    assert len(team.blocks) == 1
    return tree.token_count, f"whole on one rank, {team.recomputed_layers} layers recomputed"


@pytest.mark.parametrize(("file", "size", "overrides"), PLANS)
def test_the_largest_group_of_a_recipe_trains_in_what_the_model_leaves_of_its_gpus(
    file: str, size: str, overrides: tuple[str, ...]
):
    run = run_of(file, *overrides)
    ranks = run.trainer.world_size
    assert trainer_device(engines=run.log.lanes, gpus=GPUS, ranks=ranks) == "cuda"
    assert run.log.lanes + ranks == GPUS
    shape, budget = shape_of(run, size), budget_of(run, size)
    least = least_budget_bytes(
        shape,
        longest_path=run.model.context_tokens_max,
        head_chunk=run.trainer.head_chunk_tokens,
    )
    assert least <= budget
    tree = largest_tree(run)
    assert run.trainer.tree_tokens_max is not None
    assert tree.token_count <= run.trainer.tree_tokens_max
    tokens, way = tokens_at_once(run, size, tree)
    assert tokens >= 256, "shorter blocks leave most of a GPU idle"
    gigabytes = f"{budget / 1e9:.1f} GB"
    row = f"| `{file}` | {size} | {tree.token_count:,} | {gigabytes} | {least / 1e9:.1f} GB |"
    assert f"{row} {way} |" in (RECIPES / "README.md").read_text()


@pytest.mark.parametrize(("file", "size", "overrides"), PLANS)
def test_a_tree_of_the_recipes_limit_has_a_plan(file: str, size: str, overrides: tuple[str, ...]):
    """The merger fails larger groups, so no group that reaches the trainer is without a plan."""
    run = run_of(file, *overrides)
    limit = run.trainer.tree_tokens_max
    assert limit is not None
    tokens = np.arange(limit, dtype=np.int32)
    path = Sample(
        tokens=tokens,
        sampled=tokens[1:].astype(np.int64),
        behaviour=np.full(limit - 1, -1.0, np.float32),
        advantage=1.0,
        rollout=0,
    )
    tokens_in_a_run, _ = tokens_at_once(run, size, read_tree(merged_tree([path])))
    assert tokens_in_a_run >= 64


@pytest.mark.parametrize("file", ["maths.toml", "coding.toml"])
def test_the_comments_of_a_run_file_say_what_its_numbers_give(file: str):
    run, text = run_of(file), (RECIPES / file).read_text()
    [queue] = run.queues
    [bound] = staleness_bounds(run).values()
    rule = f"floor(({queue.slots} + {queue.window} - 2) / {queue.groups_per_step}) = {bound} steps"
    assert rule in text
    [tokens] = re.findall(r"# G: .*?([\d,]+) tokens$", text, re.MULTILINE)
    assert int(tokens.replace(",", "")) == largest_tree(run).token_count
    [first_line] = re.findall(r"(\d) engines, (\d) ranks", text)
    assert first_line == (str(run.log.lanes), str(run.trainer.world_size))
