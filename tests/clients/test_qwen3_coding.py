"""The coding recipe: mini-swe-agent by the recipe's configuration, with a scripted model."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from forgemq_agents.black_box import BlackBox
from forgemq_agents.user_code import load_domains
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_rendering import Rendering
from tests.clients.install import missing
from tests.unit.gateway.scripted_lane import Asked, contexts_of, wall_ms
from tests.unit.gateway.world import configuration_of, running
from tests.unit.graders.episodes import answered
from tests.unit.qwen3.recipe import RECIPES, run_of, write_scaled_model

pytestmark = pytest.mark.clients

TASK = {
    "question": "Double the number on the input.",
    "tests": [{"stdin": "4\n", "stdout": "8\n"}, {"stdin": "-1\n", "stdout": "-2\n"}],
}
PROGRAM = "print(2 * int(input()))"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat solution.py"


class Claimed:
    """As much of an episode as a black box needs."""

    def __init__(self, claim: dict[str, Any]) -> None:
        self.base_url, self.key, self.task = claim["base_url"], claim["key"], TASK
        self.session_url = claim["base_url"].removesuffix("/v1")
        self.environ = dict(os.environ)
        self.result: Any = None
        self.truncated_by: str | None = None

    def truncate(self, cause: str | None) -> None:
        self.truncated_by = cause


@pytest.fixture(autouse=True)
def _imports() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path


@pytest.fixture
def play(tmp_path: Path) -> BlackBox:
    """The recipe's agent, whose commands run in the episode's folder instead of a container."""
    assert missing("mini_swe_agent") == ""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(TASK))
    files = (f"queues.coding.{name}={tasks}" for name in ("task_file", "held_out_file"))
    agent = load_domains(run_of("coding.toml", *files, "evaluation.tasks=1"))["coding"].play
    assert isinstance(agent, BlackBox)
    configuration = yaml.safe_load((RECIPES / "scaffold.yaml").read_text())
    configuration["environment"] = {"environment_class": "local", "timeout": 30}
    configuration["agent"]["step_limit"] = 3
    file = tmp_path / "scaffold.yaml"
    file.write_text(yaml.safe_dump(configuration))
    python, *_, task_file, result_file = agent.command
    command = (python, "-m", "qwen3_recipe.scaffold", str(file), task_file, result_file)
    return BlackBox(
        command=command,
        timeout_s=agent.timeout_s,
        environ=agent.environ,
        truncates_at_timeout=agent.truncates_at_timeout,
        policy_statuses=agent.policy_statuses,
    )


async def played(play: BlackBox, folder: Path, replies: list[str]) -> tuple[Claimed, list[str]]:
    """The episode in which the policy says this, and each context with its reply as text."""
    configuration = configuration_of(write_scaled_model(folder), context_tokens_max=12_288)
    model = msgspec.structs.replace(configuration.model, renderer="qwen3")
    left = iter(replies)

    def say(asked: Asked) -> str:
        return next(left)

    log = MemoryLog(run="r", clock_ms=wall_ms).open
    changed = msgspec.structs.replace(configuration, model=model)
    async with running(log, changed, say) as (world, _):
        episode = Claimed(await world.episode())
        await play(episode)  # type: ignore[arg-type]  # as much of one as it needs
        records = await world.records(topics.FINISHED_COMPLETIONS)
    wholes = contexts_of(records)
    rendering = Rendering.load(str(folder), renderer="qwen3")
    return episode, [rendering.decode(wholes[record.request_id]) for record in records]


def call(command: str) -> str:
    written = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<think>\nI see.\n</think>\n\n<tool_call>\n{written}\n</tool_call>"


@pytest.mark.timeout(300)
async def test_mini_swe_agent_submits_a_program_that_the_recipe_grades(play, tmp_path):
    write = f"echo '{PROGRAM}' > solution.py && echo 3 | python3 solution.py"
    episode, texts = await played(play, tmp_path / "model", [call(write), call(SUBMIT)])
    assert episode.result["exit_status"] == "Submitted"
    assert (episode.result["submission"], episode.result["steps"]) == (f"{PROGRAM}\n", 2)
    assert episode.truncated_by is None
    assert "<tool_response>\n<returncode>0</returncode>\n<output>\n6\n" in texts[-1]
    assert texts[-1].startswith(texts[0])
    from qwen3_recipe.coding import outcome  # On the path of the run file.

    assert await outcome(answered("", task=TASK, result=episode.result)) == 1.0


@pytest.mark.timeout(300)
async def test_the_scaffolds_limit_of_turns_truncates_the_episode(play, tmp_path):
    episode, texts = await played(play, tmp_path / "model", [call("ls")] * 3)
    assert (episode.truncated_by, len(texts)) == ("too_many_turns", 3)
    assert "truncated_by" not in episode.result
