"""The recipes for Qwen3, with a model of its shape scaled down: data, prompts, rewards, memory."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from forgemq_agents.user_code import load_domains
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.model_folder import check_model_folder
from forgemq_rendering import Rendering
from forgemq_rendering.tokenizer import FolderTokenizer
from forgemq_settings.user_code import add_code_paths
from forgemq_trainer.model import load_model
from forgemq_trainer.model_sizes import model_shape
from tests.clients.install import folder_of
from tests.unit.demo.conftest import TokenPolicy
from tests.unit.graders.episodes import answered
from tests.unit.recipes.recipe import PUBLISHED, config_of, run_of, write_scaled_model
from tests.unit.reward.test_service import Desk

PROBLEMS = [
    {"problem": "What is 1/2 + 1/4?", "answer": "\\frac{3}{4}", "level": 1},
    {"problem": "Expand $(x+1)^2$.", "answer": "x^2+2x+1", "level": 2},
    {"problem": "How many primes are below 10?", "answer": "4", "level": 1},
]
PROGRAMS = [
    {
        "question": "Double the number on the input.",
        "tests": [{"stdin": "4\n", "stdout": "8\n"}, {"stdin": "-1\n", "stdout": "-2\n"}],
    }
]
INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(autouse=True)
def _imports() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scaled_model(tmp_path_factory.mktemp("models") / "scaled")


def maths_run(
    folder: Path, model: Path, *overrides: str, ending: str = "jsonl"
) -> RunConfiguration:
    """The run of the recipe with a small data set, which `datasets` writes."""
    held_out, training = Dataset.from_list(PROBLEMS[:1]), Dataset.from_list(PROBLEMS[1:])
    files = {"task_file": training, "held_out_file": held_out}
    named = {name: folder / f"{name}.{ending}" for name in files}
    for name, rows in files.items():
        (rows.to_json if ending == "jsonl" else rows.to_parquet)(named[name])
    return run_of(
        "maths.toml",
        f"model.path={model}",
        "evaluation.tasks=1",
        *(f"queues.maths.{name}={path}" for name, path in named.items()),
        *overrides,
    )


def policy_of(run: RunConfiguration, task: Any, reply: str, *, is_cut: bool = False) -> TokenPolicy:
    """An episode of this task whose policy says this, with the recipe's renderer and context."""
    rendering = Rendering.load(run.model.path, renderer=run.model.renderer)
    encode = FolderTokenizer(Path(run.model.path)).encode

    async def sample(context: list[int], room: int) -> list[int]:
        ids = encode(reply)
        return ids if is_cut else [*ids, rendering.stop_token_ids[0]]

    policy = TokenPolicy(rendering, sample)
    policy.task = task
    policy.context_tokens_max = run.model.context_tokens_max
    return policy


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_that_datasets_writes_are_the_tasks(tmp_path: Path, model: Path, ending: str):
    domain = load_domains(maths_run(tmp_path, model, ending=ending))["maths"]
    first_pass = [domain.task_source(0, "maths", number) for number in range(2)]
    assert sorted(first_pass, key=lambda task: task["level"], reverse=True) == PROBLEMS[1:]
    assert domain.task_source(0, "maths", 1_000_000) == PROBLEMS[0]


async def test_the_problem_is_asked_in_qwen3s_form_and_a_cut_reply_is_truncated(
    tmp_path: Path, model: Path
):
    run = maths_run(tmp_path, model)
    domain = load_domains(run)["maths"]
    task = domain.task_source(0, "maths", 1_000_000)
    policy = policy_of(run, task, "<think>\nHalves.\n</think>\n\nIt is \\boxed{3/4}.")
    await domain.play(policy)
    assert policy.rendering.decode(policy.contexts[0]) == (
        f"<|im_start|>user\nWhat is 1/2 + 1/4?\n\n{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert policy.completions[0].text == "It is \\boxed{3/4}."
    assert policy.truncated_by is None
    cut = policy_of(run, task, "<think>\nHalves", is_cut=True)
    await domain.play(cut)
    assert cut.truncated_by == "turn_too_long"


@pytest.mark.slow
async def test_right_and_wrong_answers_are_graded_by_the_recipes_rewards(
    tmp_path: Path, model: Path
):
    run = maths_run(tmp_path, model, "log.group_partitions=2")
    row = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 "
    answers = [
        ("<think>\nHalves.\n</think>\n\nIt is \\boxed{0.75}.", (1.0, 0.0)),
        ("<think>\n\\boxed{3/4}\n</think>\n\nIt is \\boxed{1}.", (0.0, 0.0)),
        ("No idea.", (0.0, 0.0)),
        (f"{row * 5}\\boxed{{\\frac34}}", (1.0, pytest.approx(-0.08, abs=0.02))),
    ]
    tokenizer = FolderTokenizer(model)
    desk = Desk(run, tmp_path)
    await desk.open()
    async with desk.service():
        for number, (answer, _) in enumerate(answers):
            await desk.play(
                0,
                [tokenizer.encode(answer)],
                group=f"g-{number}",
                domain="maths",
                task=json.dumps(PROBLEMS[0]).encode(),
            )
            grades = await desk.records(topics.GRADED_EPISODES, count=number + 1)
    await desk.log.close()
    found = [(grade.outcome, grade.process[0].value) for grade in grades]
    assert found == [expected for _, expected in answers], [grade.detail for grade in grades]


def test_the_scaffold_is_run_where_its_installer_puts_it():
    add_code_paths(run_of("coding.toml").code_paths)
    from qwen3_recipe.coding import play  # On the path of the run file.

    assert play.command[0] == str(folder_of("mini_swe_agent") / "venv/bin/python")


@pytest.mark.slow
async def test_the_submitted_program_is_run_against_the_tests_of_its_row(tmp_path: Path):
    held_out = [{**PROGRAMS[0], "question": "Double it."}]
    for split, rows in (("train", PROGRAMS), ("test", held_out)):
        Dataset.from_list(rows).to_json(tmp_path / f"{split}.jsonl")
    files = (f"queues.coding.{name}={tmp_path}" for name in ("task_file", "held_out_file"))
    run = run_of("coding.toml", *files, "evaluation.tasks=1")
    task = load_domains(run)["coding"].task_source(0, "coding", 0)
    from qwen3_recipe.coding import outcome  # On the path of the run file.

    right = {"exit_status": "Submitted", "submission": "print(2 * int(input()))\n"}
    halved = {"exit_status": "Submitted", "submission": "print(8)\n"}
    for result, expected in (
        (right, 1.0),
        (halved, 0.5),
        ({"exit_status": "LimitsExceeded", "submission": ""}, 0.0),
        (None, 0.0),
    ):
        assert await outcome(answered("done", task=task, result=result)) == expected


def test_the_scaled_model_is_one_that_a_run_takes_and_the_trainer_loads(model: Path):
    check_model_folder(model)
    loaded = load_model(model, dtype="float32", device="cpu")
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == PUBLISHED["4B"]["architectures"]
    shape, published = loaded.policy.shape, model_shape(config_of("4B"), dtype=torch.float32)
    assert (shape.query_size / shape.key_size, shape.is_head_tied, shape.is_head_normed) == (
        published.query_size / published.key_size,
        published.is_head_tied,
        published.is_head_normed,
    )
