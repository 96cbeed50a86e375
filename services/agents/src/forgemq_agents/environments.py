"""Environments of verifiers, by what the installed version calls one."""

from collections.abc import Callable
from importlib.metadata import version
from typing import TypeAlias

from forgemq_agents import environment_agent, taskset_agent
from forgemq_agents.environment_agent import EnvironmentAgent
from forgemq_agents.environment_errors import UnplayableError
from forgemq_agents.taskset_agent import TasksetAgent

Load: TypeAlias = Callable[[str], EnvironmentAgent | TasksetAgent]


def load_environment(name: str) -> EnvironmentAgent | TasksetAgent:
    """Load an environment of the installed verifiers.

    Raises:
        UnplayableError: it cannot be loaded or played.
        PackageNotFoundError: verifiers is not installed.
    """
    return loader_of(version("verifiers"))(name)


def loader_of(installed: str) -> Load:
    """What loads an environment of this version of verifiers.

    Raises:
        UnplayableError: nothing does: its environments are of a kind between.
    """
    release = tuple(map(int, installed.split(".")[:2]))
    if release == (0, 1):
        return environment_agent.load
    if release >= (0, 4):
        return taskset_agent.load
    raise UnplayableError(
        f"verifiers {installed} is installed; environments are played with 0.1.10, and with 0.4 "
        "and later versions"
    )
