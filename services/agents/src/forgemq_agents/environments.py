"""Environments of verifiers, by what the installed version calls one."""

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeAlias

from forgemq_agents import environment_agent, taskset_agent
from forgemq_agents.environment_agent import EnvironmentAgent
from forgemq_agents.environment_errors import UnplayableError
from forgemq_agents.taskset_agent import TasksetAgent

Load: TypeAlias = Callable[[str], EnvironmentAgent | TasksetAgent]


def load_environment(name: str, *, is_scored: bool = True) -> EnvironmentAgent | TasksetAgent:
    """Load an environment of the installed verifiers.

    Args:
        name: That of its module.
        is_scored: Its rewards are the outcome, and not a function of the queue.

    Raises:
        UnplayableError: it cannot be loaded or played.
        PackageNotFoundError: verifiers is not installed.
    """
    agent = loader_of(version("verifiers"))(name)
    if isinstance(agent, TasksetAgent):
        agent.is_scored = is_scored
    return agent


def loader_of(installed: str) -> Load:
    """What loads an environment of this version of verifiers.

    Raises:
        UnplayableError: nothing does: its environments are of a kind between.
    """
    # The second number of a version may have more behind it, as 0.5rc1.
    numbers = re.match(r"(\d+)(?:\.(\d+))?", installed)
    release = (int(numbers[1]), int(numbers[2] or 0)) if numbers else (0, 0)
    if release == (0, 1):
        return environment_agent.load
    if release >= (0, 4):
        return taskset_agent.load
    raise UnplayableError(
        f"verifiers {installed} is installed; environments are played with 0.1.10, and with 0.4 "
        "and later versions"
    )
