"""Every recipe is planned with its model's config.json: what fits, why not, and what pages say."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch_allocation import peak_allocated_bytes
from transformers import AutoConfig, AutoModelForCausalLM

from forgemq_contracts import topics
from forgemq_contracts.loss import Loss
from forgemq_contracts.trainer_plan import AskedStep, GroupsOfTree, PlannedStep
from forgemq_launcher.plan.episodes import EpisodeShape
from forgemq_launcher.plan.group_trees import usual_tree
from forgemq_launcher.upkeep.engine_servers import options_of_engines
from forgemq_launcher.user_code import check_user_code
from forgemq_sglang_cpu.options import command_line, is_mixture
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.plan import answer
from tests.unit.recipes.planned_recipes import (
    AGENT,
    BLOCK,
    PAGES,
    RECIPES,
    block_of,
    page_of,
    report_of,
    run_of,
)
from tests.unit.recipes.scaled_recipes import SCALED_FILES, scaled_config

FILES = sorted(RECIPES.glob("*/*.toml"))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "machines"), PAGES, ids=lambda each: str(each)[:8])
def test_a_recipes_page_shows_its_plan(file: str, machines: dict[str, Any]):
    """The module of the recipes' plans says how the blocks are written again."""
    shown = BLOCK.search(page_of(file).read_text())
    assert shown is not None
    assert shown[1].splitlines() == list(block_of(report_of(file, **machines)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "overrides", "machines", "expected"),
    [
        ("qwen3-4b/coding.toml", (), {"gpu": "h100", "episode": AGENT}, ()),
        (
            "qwen3-4b/maths.toml",
            (),
            {"gpu": "h100", "gpus": 4},
            ("engines and ranks want 4 + 4 GPUs, the machines have 4",),
        ),
        (
            "qwen3-4b/maths.toml",
            ("trainer.world_size=1",),
            {"gpu": "h100"},
            ("weights, gradients and moments take 72.4 GB of each of 1 ranks, and there are",),
        ),
        ("qwen3-4b/maths.toml", ("trainer.world_size=1",), {"gpu": "h200"}, ()),
        ("qwen3-4b/maths.toml", ("trainer.world_size=1", "lora.rank=16"), {"gpu": "h100"}, ()),
        (
            "qwen3-4b/maths.toml",
            ("trainer.shard_ranks=1",),
            {"gpu": "h100"},
            (
                "weights, gradients and moments take 72.4 GB of each of 4 ranks, and there are "
                "72.0 GB: more ranks (trainer.shard_ranks)",
            ),
        ),
        (
            "qwen3-30b-a3b/maths.toml",
            (),
            {"gpu": "h100"},
            ("weights, gradients and moments take 91.6 GB of each of 6 ranks, and there are 72",),
        ),
        (
            "minimax-m2/coding.toml",
            ("lanes.0.tensor_parallel=1",),
            {"gpu": "h200", "nodes": 7, "episode": AGENT},
            ("an engine of 1 GPUs has room for 0 tokens of K/V beside 457.4 GB",),
        ),
    ],
)
def test_what_does_not_fit_is_said_with_both_numbers(
    file: str, overrides: tuple[str, ...], machines: dict[str, Any], expected: tuple[str, ...]
):
    found = report_of(file, *overrides, **machines).reasons
    for reason in expected:
        assert any(each.startswith(reason) for each in found), found
    assert bool(found) == bool(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("shard_ranks", "is_noted"), [(6, True), (8, False)])
def test_replicas_that_gather_between_nodes_are_noted(shard_ranks: int, is_noted: bool):
    changes = (f"trainer.world_size={2 * shard_ranks}", f"trainer.shard_ranks={shard_ranks}")
    report = report_of("qwen3-30b-a3b/maths.toml", *changes, gpu="h200", nodes=3)
    noted = [note for note in report.notes if "weights are gathered between nodes" in note]
    assert bool(noted) == is_noted
    # In a ring of two replicas each rank sends its shard of float32 gradients; of 128 experts 6
    # ranks have 22 each, so 132.
    sent = 4 * report.plan.model.parameters / shard_ranks
    padded = 132 / 128 if shard_ranks == 6 else 1
    assert sent <= report.plan.step.replicated_bytes <= sent * padded


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.parent.name + "-" + path.stem)
def test_a_recipes_engines_and_code_start_as_its_file_says(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.path", list(sys.path))
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    files = (f"queues.0.{name}={data}" for name in ("task_file", "held_out_file"))
    run = run_of(str(file.relative_to(RECIPES)), *files)
    check_user_code(run)
    engines = options_of_engines(run, gpus=64, environ={"FORGEMQ_TRAINER_DEVICE": "cuda"})
    assert len(engines) == run.log.lanes
    has_experts = is_mixture(file.with_name("config.json").read_bytes())
    command = command_line(engines[0], model_path="m", host="h", port=1, has_experts=has_experts)
    gpus = run.lanes[0].tensor_parallel if run.lanes else 1
    assert command[command.index("--tp-size") + 1] == str(gpus)
    assert ("--enable-return-routed-experts" in command) == (file.parent.name != "qwen3-4b")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SCALED_FILES)
def test_the_planned_bytes_of_a_recipes_scaled_model_are_what_torch_holds(recipe: str):
    """The recipe's config.json with fewer and narrower layers, through the trainer itself."""
    config = scaled_config(recipe)
    tree = usual_tree(EpisodeShape(turns=2, prompt=64, sampled=40, observed=20), episodes=6)
    tree = msgspec.structs.replace(tree, tokens=bytes(len(tree.tokens)))
    changes = ("trainer.world_size=1", "trainer.expert_ranks=1", "model.dtype=float32")
    run = run_of(SCALED_FILES[recipe], *changes, "trainer.head_chunk_tokens=32")
    group = GroupsOfTree(tree=topics.encode(tree), groups=1)
    asked = AskedStep(
        config=json.dumps(config).encode(),
        configuration=run,
        device="cpu",
        step=(group,),
        largest=(),
    )
    planned = answer(asked)
    assert isinstance(planned, PlannedStep)
    torch.manual_seed(0)
    loaded = prepare(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))
    forest = read_tree(tree)
    (batch,) = plan_step(
        [forest],
        shape=loaded.policy.shape,
        budget_bytes=run.trainer.memory_budget_bytes,
        head_chunk=run.trainer.head_chunk_tokens,
    )

    def step() -> None:
        forward_backward(
            loaded.policy,
            Objective(forests=[forest], loss_weights=[1.0], loss=loss_function(Loss())),
            [batch],
            head_chunk=run.trainer.head_chunk_tokens,
        )

    step()  # Makes the parameters' gradients.
    assert peak_allocated_bytes(step) == pytest.approx(planned.predicted_bytes, rel=0.07)
