"""The coding recipe: mini-swe-agent by the recipe's configuration, with a scripted model."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forgemq_agents.black_box import BlackBox
from forgemq_agents.errors import AgentStatusError
from forgemq_agents.user_code import load_domains
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_rendering import Rendering
from tests.clients.install import missing
from tests.unit.gateway.scripted_lane import Asked, contexts_of, wall_ms
from tests.unit.gateway.world import configuration_of, running
from tests.unit.graders.episodes import answered
from tests.unit.recipes.recipe import run_of, write_scaled_model

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


class Docker:
    """Stands in for docker: runs the commands of a container in a folder, and notes its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "container"
        self.folder.mkdir()
        self._calls = folder / "calls"
        self.program = folder / "docker"
        # `exec -w CWD ID bash -lc COMMAND`, as mini-swe-agent calls it.
        self.program.write_text(
            f'#!/bin/sh\necho "$*" >> {self._calls}\n'
            f'case $1 in run) echo c1 ;; exec) cd {self.folder}; shift 4; exec "$@" ;; esac\n'
        )
        self.program.chmod(0o755)

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()


@pytest.fixture
def docker(tmp_path: Path) -> Docker:
    return Docker(tmp_path)


@pytest.fixture
def play(tmp_path: Path) -> BlackBox:
    """The recipe's agent."""
    assert missing("mini_swe_agent") == ""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "train.jsonl").write_text(json.dumps(TASK))
    (tasks / "test.jsonl").write_text(json.dumps([TASK]))
    files = (f"queues.coding.{name}={tasks}" for name in ("task_file", "held_out_file"))
    agent = load_domains(run_of("coding.toml", *files, "evaluation.tasks=1"))["coding"].play
    assert isinstance(agent, BlackBox)
    return agent


async def played(
    play: BlackBox, docker: Docker, replies: list[str], *, context_tokens_max: int = 12_288
) -> tuple[Claimed, list[str]]:
    """The episode in which the policy says this, and each context with its reply as text."""
    folder = docker.folder.parent / "model"
    configuration = configuration_of(
        write_scaled_model(folder), context_tokens_max=context_tokens_max, lease_s=300
    )
    model = msgspec.structs.replace(configuration.model, renderer="qwen3")
    left = iter(replies)

    def say(asked: Asked) -> str:
        return next(left)

    log = MemoryLog(run="r", clock_ms=wall_ms).open
    changed = msgspec.structs.replace(configuration, model=model)
    async with running(log, changed, say) as (world, _):
        episode = Claimed(await world.episode())
        episode.environ["MSWEA_DOCKER_EXECUTABLE"] = str(docker.program)
        await play(episode)  # type: ignore[arg-type]  # as much of one as it needs
        records = await world.records(topics.FINISHED_COMPLETIONS)
    wholes = contexts_of(records)
    rendering = Rendering.load(str(folder), renderer="qwen3")
    return episode, [rendering.decode(wholes[record.request_id]) for record in records]


def call(command: str) -> str:
    written = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<think>\nI see.\n</think>\n\n<tool_call>\n{written}\n</tool_call>"


@pytest.mark.timeout(300)
async def test_mini_swe_agent_submits_a_program_that_the_recipe_grades(play, docker):
    write = f"echo '{PROGRAM}' > solution.py && echo 3 | python3 solution.py"
    episode, texts = await played(play, docker, [call(write), call(SUBMIT)])
    assert episode.result["exit_status"] == "Submitted"
    assert (episode.result["submission"], episode.result["steps"]) == (f"{PROGRAM}\n", 2)
    assert episode.truncated_by is None
    assert "<tool_response>\n<returncode>0</returncode>\n<output>\n6\n" in texts[-1]
    assert texts[-1].startswith(texts[0])
    started, *commands, ended = docker.calls()
    assert "--network=none" in started
    assert len(commands) == 2
    assert ended == "rm -f c1"
    from qwen3_recipe.coding import outcome  # On the path of the run file.

    assert await outcome(answered("", task=TASK, result=episode.result)) == 1.0


@pytest.mark.timeout(300)
async def test_the_scaffolds_limit_of_turns_truncates_the_episode(play, docker):
    episode, texts = await played(play, docker, [call("ls")] * 16)
    assert (episode.truncated_by, len(texts)) == ("too_many_turns", 16)
    assert "truncated_by" not in episode.result


@pytest.mark.timeout(300)
async def test_a_submission_of_any_size_is_cut_to_what_graders_read(play, docker):
    huge = call(
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && head -c 9000000 /dev/zero | tr '\\0' x"
    )
    episode, _ = await played(play, docker, [huge])
    assert episode.result == {
        "exit_status": "Submitted",
        "submission": "x" * 65_536,
        "steps": 1,
    }


@pytest.mark.timeout(300)
async def test_a_full_context_ends_the_program_at_once_and_its_container(play, docker):
    """The gateway knows that it refused the episode's newest request, and truncates the episode."""
    long = call("seq 1 900")
    with pytest.raises(ExceptionGroup) as raised:
        await played(play, docker, [long] * 16, context_tokens_max=4000)
    assert raised.group_contains(AgentStatusError, match="ContextWindowExceeded")
    _, *commands, ended = docker.calls()
    assert 1 <= len(commands) < 16
    assert ended == "rm -f c1"
