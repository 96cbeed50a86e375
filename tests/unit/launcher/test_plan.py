"""`forgemq plan`: its numbers against others' formulas, and what it refuses. The trainer's planner
is called in this process."""

import io
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forgemq_contracts.lane_engines import LaneEngines
from forgemq_contracts.lora import Lora
from forgemq_contracts.run import RunConfiguration, Trainer
from forgemq_contracts.trainer_plan import AskedModel, PlannedModel, RefusedPlan
from forgemq_launcher.core.configuration import configuration, document
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.placement import adapter_parameters_of, parameters_of
from forgemq_launcher.plan.engine_memory import (
    engine_memory,
    key_bytes_per_token,
    reserved_bytes,
    weight_bytes,
)
from forgemq_launcher.plan.episode_records import PlannedQueue
from forgemq_launcher.plan.episodes import EpisodeShape, largest_group
from forgemq_launcher.plan.findings import notes, reasons
from forgemq_launcher.plan.group_trees import largest_tree, usual_tree
from forgemq_launcher.plan.log_bytes import step_bytes
from forgemq_launcher.plan.machines import GPUS, Machines
from forgemq_launcher.plan.run_plan import PlannedRun, plan_of
from forgemq_launcher.plan.trainer_memory import trainer_memory
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.plan import answer
from tests.small_run import small_run

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "deploy" / "demo"

TWO_H100 = Machines(
    gpu="h100",
    gpus=2,
    nodes=1,
    host_bytes=10**12,
    disk_bytes=10**13,
    utilisation=0.5,
    bandwidth_share=0.7,
)
"""One for the engine and one for the trainer."""

SIZES = PlannedModel(
    model_type="tiny",
    layers=10,
    embedding=1000,
    head=1000,
    attention=400,
    mlp=0,
    experts=8000,
    other=10,
    layer_max=900,
    query_heads=8,
    key_heads=4,
    head_size=16,
    experts_count=8,
    experts_per_token=2,
)


@pytest.mark.parametrize(
    ("shape", "episodes", "a_completion"),
    [
        (
            EpisodeShape(turns=1, prompt=300, sampled=400, task_bytes=600),
            16,
            {
                "finished-completions-v1": 6100,
                "requested-completions-v1": 2800,
                "delivered-completions-v1": 181,
                "finished-episodes-v1": 995,
                "opened-episodes-v1": 264,
                "scored-groups-v1": 231,
                "graded-episodes-v1": 181,
            },
        ),
        (
            EpisodeShape(turns=40, prompt=16_000, sampled=400, observed=4200, task_bytes=3000),
            8,
            {
                "finished-completions-v1": 40_000,
                "requested-completions-v1": 36_000,
                "finished-episodes-v1": 212,
                "scored-groups-v1": 171,
            },
        ),
    ],
    ids=["single_turn", "context_200k"],
)
def test_bytes_of_a_step_are_those_of_the_load_test_of_what_a_run_keeps(
    shape: EpisodeShape, episodes: int, a_completion: dict[str, int]
):
    """docs/sizes.md has them: real services write there, and not the records of a plan.

    Its trees are larger, as episodes of a group share no prompt there.
    """
    run = small_run(group_partitions=1)
    queue = msgspec.structs.replace(run.queues[0], group_size=episodes, groups_per_step=4)
    log = step_bytes([PlannedQueue(queue=queue, shape=shape)], run, weights_bytes=1)
    completions = 4 * episodes * shape.turns
    found = {each.topic: each.inline_bytes / completions for each in log}
    for topic, size in a_completion.items():
        assert found[topic] == pytest.approx(size, rel=0.1), topic


def test_a_value_above_the_inline_limit_is_counted_as_a_blob():
    run = small_run(group_partitions=1)
    queue = msgspec.structs.replace(run.queues[0], group_size=8, groups_per_step=1)
    shape = EpisodeShape(turns=1, prompt=16, sampled=10_000)
    log = step_bytes([PlannedQueue(queue=queue, shape=shape)], run, weights_bytes=1)
    (tree,) = [each for each in log if each.topic == "merged-trees-v1"]
    assert tree.blob_bytes > 8 * 10_000 * 16 > run.log.inline_bytes_max > tree.inline_bytes


def test_planned_trees_are_trees_that_the_trainer_reads():
    shape = EpisodeShape(turns=3, prompt=20, sampled=5, observed=7)
    forest = read_tree(usual_tree(shape, episodes=4))
    assert forest.token_count == 20 + 4 * (3 * 5 + 2 * 7)
    assert forest.entry_count == 4 * 3 * 5
    assert forest.sample_count == 4 * 3


@pytest.mark.parametrize(("turns", "shared"), [(1, 292), (2, 0)])
def test_the_largest_group_fills_the_context_and_shares_what_one_turn_cannot_sample(
    turns: int, shared: int
):
    run = configuration(
        document((DEMO / "run.toml").read_text(), overrides=()), run="r", folder=ROOT
    )
    assert (run.model.context_tokens_max, run.episodes.sampling.max_tokens) == (372, 80)
    group = largest_group(run.queues[0], run, turns=turns)
    tree = read_tree(largest_tree(group))
    assert group.shared == shared
    assert tree.token_count == shared + run.queues[0].group_size * (372 - shared)
    assert int(tree.position_N.max()) + 1 == 372


def test_parameters_by_part_are_those_of_the_models_files():
    sizes = answer(AskedModel(config=(DEMO / "model" / "config.json").read_bytes()))
    assert isinstance(sizes, PlannedModel)
    assert sizes.parameters == parameters_of(DEMO / "model")
    # width 128, 4 query and 2 key heads of 32, MLP of 384, 3 layers, 704 tokens, tied head.
    assert sizes.embedding == 704 * 128
    assert sizes.head == 0
    assert sizes.attention == 3 * (2 * 128 * 128 + 2 * 128 * 64 + 2 * 32)
    assert sizes.mlp == 3 * 3 * 128 * 384
    assert sizes.other == (2 * 3 + 1) * 128


def test_weights_of_an_engine_are_split_as_its_shape_says():
    whole = weight_bytes(SIZES, LaneEngines(), is_quantised=False)
    assert whole == 2 * SIZES.parameters
    spread = LaneEngines(tensor_parallel=4, attention_data_parallel=2, expert_parallel=4)
    split = 2 * (2000 / 2 + 400 / 2 + 8000 / 4 + 10)
    assert weight_bytes(SIZES, spread, is_quantised=False) == split
    assert weight_bytes(SIZES, LaneEngines(), is_quantised=True) < whole


def test_an_engine_keeps_what_weights_and_graphs_leave():
    gpu, run = GPUS["h100"], small_run(group_partitions=1, lanes=2)
    [engine] = engine_memory(run, SIZES, gpu)
    # 512 + 1.5 * 8192 for activations, 1024 / 8 for one GPU, 2 * 256 and 8 * 58 for graphs; MiB.
    assert reserved_bytes(gpu.memory_bytes, LaneEngines()) == (512 + 12_288 + 128 + 512 + 464) << 20
    assert engine.key_bytes_per_token == 2 * 10 * 4 * 16 * 2
    free = gpu.memory_bytes - engine.reserved_bytes - 2 * SIZES.parameters
    assert engine.cached_tokens == free // engine.key_bytes_per_token
    assert (engine.lanes, engine.gpus) == (2, 1)


def test_an_engine_keeps_latent_keys_whole_on_each_gpu():
    """As SGLang 0.5.23 counts them in `model_executor/pool_configurator.py`."""
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "n_routed_experts": 16}
    model = answer(AskedModel(config=json.dumps(config).encode()))
    assert isinstance(model, PlannedModel)
    assert (model.latent_size, SIZES.latent_size) == (512 + 64, 0)
    for gpus in (1, 8):
        assert key_bytes_per_token(model, LaneEngines(tensor_parallel=gpus)) == 4 * 576 * 2
    assert key_bytes_per_token(SIZES, LaneEngines(tensor_parallel=2)) == 2 * 10 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("changes", "overrides", "reason"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 371, "max_window_layers": 1},
            (),
            "model.context_tokens_max must be at most the model's sliding_window, 371, got 372",
        ),
        (
            {"model_type": "gemma3_text"},
            ("model.engine_quantization=fp8_blocks",),
            "model.engine_quantization must be none for a model of type gemma3_text",
        ),
    ],
)
def test_what_a_run_would_refuse_of_a_familys_engines_does_not_fit(
    changes: dict[str, object], overrides: tuple[str, ...], reason: str
):
    config = json.loads((DEMO / "model" / "config.json").read_bytes())
    run = configuration(
        document((DEMO / "run.toml").read_text(), overrides=overrides), run="r", folder=ROOT
    )
    found: list[tuple[str, ...]] = []
    for each in (config, config | changes):
        planned = PlannedRun(
            configuration=run,
            config=json.dumps(each).encode(),
            machines=TWO_H100,
            is_budget_named=False,
        )
        found.append(reasons(planned, plan_of(planned, answer)))
    assert not any(reason in each for each in found[0])
    assert any(reason in each for each in found[1]), found[1]


@pytest.mark.parametrize(
    ("publish", "copies", "published"), [("adapter", 1, 0), ("merged", 2, 681_024)]
)
def test_of_a_run_with_adapters_they_alone_have_a_state_beside_the_frozen_model(
    publish: str, copies: int, published: int
):
    """681,024 parameters in float32, of which the merged version is a second copy."""
    overrides = ("lora.rank=8", f"lora.publish={publish}")
    run = configuration(
        document((DEMO / "run.toml").read_text(), overrides=overrides), run="r", folder=ROOT
    )
    assert run.lora is not None
    config = (DEMO / "model" / "config.json").read_bytes()
    adapters = adapter_parameters_of(DEMO / "model", run.lora)
    plan = plan_of(
        PlannedRun(configuration=run, config=config, machines=TWO_H100, is_budget_named=False),
        answer,
    )
    assert plan.model.adapters == adapters
    assert plan.trainer.state_bytes == 16 * adapters + copies * 4 * 681_024
    assert plan.host.weights_bytes == 4 * (published or adapters)
    assert plan.host.checkpoint_bytes == 12 * adapters
    (engine,) = plan.engines
    assert engine.weight_bytes == 2 * (681_024 + (0 if published else 2 * adapters))
    assert plan.seconds is not None
    assert plan.seconds.update_s == pytest.approx(2 * 16 * adapters / (0.7 * 3.35e12))


def test_a_rank_gathers_its_half_of_spread_experts_and_gradients_only_of_what_trains():
    """A layer of 900 parameters, 800 of them experts; adapters of 30 in each layer."""
    sizes = msgspec.structs.replace(SIZES, layer_experts_max=800)
    trainer = Trainer(steps=1, world_size=4, shard_ranks=2, expert_ranks=2)
    small = small_run(group_partitions=1)
    model = msgspec.structs.replace(small.model, dtype="float32")
    run = msgspec.structs.replace(small, trainer=trainer, model=model)

    def gathered(run: RunConfiguration, sizes: PlannedModel) -> int:
        return trainer_memory(run, sizes, TWO_H100, is_budget_named=False).gathered_bytes

    assert gathered(run, sizes) == 2 * 500 * 4 + 500 * (4 + 4) + 1000 * 4
    adapted = msgspec.structs.replace(run, lora=Lora())
    with_adapters = msgspec.structs.replace(sizes, adapters=300)
    assert gathered(adapted, with_adapters) == 2 * 500 * 4 + 30 * (4 + 4) + 1000 * 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("speculation.model=m", "what guesses tokens ahead ([speculation]) is not counted on"),
        ('pool.storage="file"', "the pool ([pool]) is not counted: it takes host memory"),
        (
            'lanes=[{flags=["--mem-fraction-static", "0.5"]}]',
            "lanes.flags are not read: one may change what an engine keeps free",
        ),
    ],
)
def test_a_plan_says_what_of_the_run_it_has_not_counted(override: str, said: str):
    plain, asked = (
        PlannedRun(
            configuration=configuration(
                document((DEMO / "run.toml").read_text(), overrides=overrides), run="r", folder=ROOT
            ),
            config=(DEMO / "model" / "config.json").read_bytes(),
            machines=TWO_H100,
            is_budget_named=False,
        )
        for overrides in ((), (override,))
    )
    plan = plan_of(plain, answer)
    assert [note for note in notes(plain, plan) if note.startswith(said)] == []
    assert len([note for note in notes(asked, plan) if note.startswith(said)]) == 1


def test_a_target_that_the_planned_model_lacks_is_refused_by_name():
    config = (ROOT / "deploy/recipes/qwen3-30b-a3b/config.json").read_bytes()
    refused = answer(AskedModel(config=config, lora=Lora()))
    assert isinstance(refused, RefusedPlan)
    assert refused.reason.startswith("lora.targets: gate_proj is no linear layer of Qwen3Moe")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--gpu", "h10"), "--gpu: no such machine 'h10'; did you mean h100?"),
        (("--gpu", "cpu"), "--host-memory: must be given with --gpu cpu"),
        (
            ("--gpu", "h100", "--episode", "rounds=2"),
            "--episode: no such field 'rounds'; there are turns, prompt, sampled, observed",
        ),
        (("--gpu", "h100", "--episode", "turns=0"), "--episode turns: a number of at least 1"),
        (("--gpu", "h100", "--episode", "turns=1,turns=2"), "--episode turns: is stated twice"),
        (
            ("--gpu", "h100", "--episode", "sampled=81"),
            "at most the max_tokens of queues.shop_desk",
        ),
        (("--gpu", "h100", "--episode", "turns=9"), "tokens are more than the context_tokens_max"),
        (("--gpu", "h100", "--config", "nowhere"), "--config: there is no nowhere"),
        (
            ("--gpu", "h100", "trainer.tree_tokens_max=100000000"),
            "queues.shop_desk: a group of 99,731,478 tokens is not planned, at most 10,000,000",
        ),
        (("--gpu", "h100", "trainer.ranks=2"), "trainer.ranks: no such key"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(arguments: tuple[str, ...], expected: str):
    console = Console(file=io.StringIO(), width=200)
    status = run_tool(("plan", str(DEMO / "run.toml"), *arguments), environ={}, console=console)
    assert status == 2
    assert expected in console.file.getvalue()


def test_another_model_than_the_files_is_not_planned_by_the_config_beside_the_file():
    """Beside the recipe is that of Qwen3-4B, for a folder that is not on this machine."""
    console = Console(file=io.StringIO(), width=200)
    recipe = str(ROOT / "deploy/recipes/qwen3-4b/maths.toml")
    arguments = ("plan", recipe, "--gpu", "h100", "model.path=nowhere/Qwen3-8B")
    assert run_tool(arguments, environ={}, console=console) == 2
    assert "nowhere/Qwen3-8B/config.json; --config names the config" in console.file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("memory_gb", "status"), [("24", 0), ("15", 1)])
def test_the_command_asks_a_process_of_the_trainer_and_ends_with_whether_the_run_fits(
    memory_gb: str, status: int
):
    console = Console(file=io.StringIO(), width=200)
    episode = "turns=4,prompt=158,sampled=19,observed=35"
    options = ("--gpu", "cpu", "--host-memory", memory_gb, "--episode", episode, "--json")
    arguments = ("plan", str(DEMO / "run.toml"), "trainer.memory_budget_bytes=8019000000", *options)
    assert run_tool(arguments, environ=os.environ, console=console) == status
    report = json.loads(console.file.getvalue())
    assert report["fits"] == (status == 0)
    assert len(report["reasons"]) == status
    assert report["plan"]["step"]["tree_tokens"] == 8 * (158 + 8 * (4 * 19 + 3 * 35))
    assert report["plan"]["seconds"] is None


@pytest.mark.slow
def test_a_model_that_no_rank_can_hold_is_refused_for_that_and_not_for_a_budget_of_nothing():
    console = Console(file=io.StringIO(), width=200)
    recipe = ROOT / "deploy/recipes/qwen3-30b-a3b/maths.toml"
    arguments = ("plan", str(recipe), "--gpu", "h100", "--json")
    assert run_tool(arguments, environ=os.environ, console=console) == 1
    (reason,) = json.loads(console.file.getvalue())["reasons"]
    assert reason.startswith("weights, gradients and moments take 91.6 GB of each of 6 ranks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard_ranks", "memory_gb", "expected"),
    [
        (2, "60", "take 72.4 GB of 60.0 GB of memory, of which 50% may be the trainer's: more"),
        (1, "200", "take 144.8 GB of 200.0 GB of memory, .* trainer's: trainer.shard_ranks, or mo"),
    ],
)
def test_ranks_without_gpus_are_said_to_share_the_nodes_memory(
    shard_ranks: int, memory_gb: str, expected: str
):
    console = Console(file=io.StringIO(), width=200)
    recipe = ROOT / "deploy/recipes/qwen3-4b/maths.toml"
    changes = ("trainer.world_size=2", f"trainer.shard_ranks={shard_ranks}")
    arguments = ("plan", str(recipe), *changes, "--gpu", "cpu", "--host-memory", memory_gb)
    assert run_tool((*arguments, "--json"), environ=os.environ, console=console) == 1
    reason = json.loads(console.file.getvalue())["reasons"][0]
    assert re.match(f"weights, gradients and moments of 2 ranks {expected}", reason)
