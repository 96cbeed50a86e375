"""Loads the user's functions by the names in the run's configuration."""

import importlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forgemq_agents.episode import Episode
from forgemq_contracts.run import Queue, RunConfiguration, played_queues

TaskSource = Callable[[int, str, int], Any]
Play = Callable[[Episode], Awaitable[None]]


class UserCodeError(ValueError):
    """A name in the configuration does not lead to a function."""


@dataclass(frozen=True, slots=True)
class DomainCode:
    """The user's functions for one domain."""

    task_source: TaskSource
    play: Play


def load_domains(configuration: RunConfiguration) -> dict[str, DomainCode]:
    """Import the task source and the agent of every queue that has an agent.

    Raises:
        UserCodeError: naming the field, the name and what is wrong.
    """
    add_code_paths(configuration.code_paths)
    played = played_queues(configuration)
    if not played:
        raise UserCodeError("queues: none has an agent, so there is nothing to play here")
    return {queue.domain: _domain_code(queue) for queue in played}


def add_code_paths(code_paths: Sequence[str]) -> None:
    """Put these folders, in their order, before all others that Python imports from."""
    for path in reversed(code_paths):
        if path not in sys.path:
            sys.path.insert(0, path)


def _domain_code(queue: Queue) -> DomainCode:
    field = f"queues.{queue.domain}"
    return DomainCode(
        task_source=_function(queue.task_source, field=f"{field}.task_source"),
        play=_function(queue.agent, field=f"{field}.agent"),
    )


def _function(name: str, *, field: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserCodeError(f"{field}: cannot load {name!r}: {error}") from error
    if not callable(found):
        raise UserCodeError(f"{field}: {name!r} is not a function")
    return found  # type: ignore[no-any-return]  # any callable of the user; a wrong call raises
