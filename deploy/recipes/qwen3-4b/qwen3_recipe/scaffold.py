"""Plays one episode with mini-swe-agent's own classes, unmodified.

A program for mini-swe-agent's environment, in which nothing of ForgeMQ is installed:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... \
        python -m qwen3_recipe.scaffold scaffold.yaml task.json result.json
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments import get_environment
from minisweagent.environments.docker import DockerEnvironment
from minisweagent.models.litellm_model import LitellmModel

LIMITS = {"LimitsExceeded": "too_many_turns", "TimeExceeded": "out_of_time"}
"""How mini-swe-agent names the limits of its configuration, and how ForgeMQ does."""

SUBMISSION_CHARACTERS_MAX = 65_536
"""As much as the graders read of an answer. The gateway refuses a body that is too long, and the
episode of a policy that submits one would be masked instead of scored."""


def solve(configuration: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    """Let mini-swe-agent work on the task, in an environment of its own."""
    where = {
        "api_base": os.environ["OPENAI_BASE_URL"],  # noqa: TID251 - a program's own variables
        "api_key": os.environ["OPENAI_API_KEY"],  # noqa: TID251
    }
    environment = get_environment(configuration["environment"])
    try:
        model = LitellmModel(model_kwargs=where, **configuration["model"])
        agent = DefaultAgent(model, environment, **configuration["agent"])
        end = agent.run(task["question"])
    finally:
        _remove_container(environment)
    submission = end["submission"][:SUBMISSION_CHARACTERS_MAX]
    result = {
        "exit_status": end["exit_status"],
        "submission": submission,
        "steps": agent.n_calls,
    }
    limit = LIMITS.get(end["exit_status"])
    return {**result, "truncated_by": limit} if limit else result


def _remove_container(environment: object) -> None:
    """Remove the container before this program ends.

    mini-swe-agent would do so in the background, and what this program leaves is killed.
    """
    if isinstance(environment, DockerEnvironment) and environment.container_id:
        command = (environment.config.executable, "rm", "-f", environment.container_id)
        subprocess.run(command, capture_output=True, check=False)
        environment.container_id = None


def main(configuration_file: str, task_file: str, result_file: str) -> None:
    """Play the episode of a task file and leave the result."""
    configuration = get_config_from_spec(configuration_file)
    result = solve(configuration, json.loads(Path(task_file).read_text()))
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
