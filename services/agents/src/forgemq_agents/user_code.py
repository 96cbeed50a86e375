"""Loads the user's functions by the names in the run's configuration."""

import importlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from forgemq_agents import supervised
from forgemq_agents.core.samplers import READY, Sampler
from forgemq_agents.environment_errors import UnplayableError
from forgemq_agents.environments import load_environment
from forgemq_agents.episode import Episode
from forgemq_agents.errors import TaskFileError
from forgemq_agents.file_tasks import FileTasks, pool_refusal, tasks_in_files
from forgemq_agents.task_file import TaskFile
from forgemq_contracts.environments import EXTRA, environment_of
from forgemq_contracts.fields import Source
from forgemq_contracts.queues import supplied_queues
from forgemq_contracts.run import Evaluation, Queue, RunConfiguration
from forgemq_settings.user_code import add_code_paths

TaskSource = Callable[..., Any]
"""(seed, domain, number) -> task; in a stage that gives a difficulty, with `difficulty=` too."""
Play = Callable[[Episode], Awaitable[None]]


class UserCodeError(ValueError):
    """A name in the configuration does not lead to a function."""


@dataclass(frozen=True, slots=True)
class DomainCode:
    """The user's functions for one domain."""

    task_source: TaskSource
    play: Play
    sampler: Sampler | None = None
    pool: int = 0
    source: Source = "agent"


def sampled(number: object, *, pool: int, name: str) -> int:
    """The task number that a sampler returned.

    Raises:
        UserCodeError: The pool has no such task.
    """
    if isinstance(number, int) and 0 <= number < pool:
        return number
    raise UserCodeError(f"{name}: must return a task number from 0 to {pool - 1}, got {number!r}")


def load_domains(configuration: RunConfiguration) -> dict[str, DomainCode]:
    """Import the agent and the task source, or read the tasks, of every queue with an agent.

    Raises:
        UserCodeError: naming the field, the name and what is wrong.
    """
    add_code_paths(configuration.code_paths)
    supplied = supplied_queues(configuration)
    if not supplied:
        raise UserCodeError("queues: none has an agent, so there is nothing to play here")
    domains = {queue.domain: _domain_code(queue, configuration.evaluation) for queue in supplied}
    for index, stage in enumerate(configuration.stages):
        for own in stage.domains:
            if own.difficulty is not None:
                source = domains[own.domain].task_source
                _check_takes_difficulty(source, domain=own.domain, stage=index)
    return domains


def _check_takes_difficulty(source: TaskSource, *, domain: str, stage: int) -> None:
    try:
        inspect.signature(source).bind(0, domain, 0, difficulty=0.0)
        inspect.signature(source).bind(0, domain, 0)
    except TypeError as error:
        raise UserCodeError(
            f"queues.{domain}.task_source: must take (seed, domain, number) and, since "
            f"stages.{stage} gives one, difficulty with a default: {error}"
        ) from error


def _domain_code(queue: Queue, evaluation: Evaluation) -> DomainCode:
    field = f"queues.{queue.domain}"
    if queue.supervised is not None:
        return _supervised_code(queue, evaluation)
    environment = environment_of(queue.agent)
    source: TaskSource
    play: Play
    if environment is not None:
        play, source = _environment(environment, queue, evaluation)
    elif queue.task_file:
        source = _task_file(queue, evaluation)
        play = _function(queue.agent, field=f"{field}.agent")
    else:
        source = _function(queue.task_source, field=f"{field}.task_source")
        play = _function(queue.agent, field=f"{field}.agent")
    if queue.curriculum is None:
        return DomainCode(task_source=source, play=play)
    name = queue.curriculum.sampler
    sampler = READY.get(name) or _function(name, field=f"{field}.curriculum.sampler")
    pool = queue.curriculum.tasks
    if pool is None:
        assert isinstance(source, TaskFile), "a pool without a size is a file or a data set"
        pool = source.count
    if why := pool_refusal(queue, evaluation, pool):
        raise UserCodeError(why)
    return DomainCode(task_source=source, play=play, sampler=sampler, pool=pool)


def _environment(name: str, queue: Queue, evaluation: Evaluation) -> tuple[Play, TaskSource]:
    field = f"queues.{queue.domain}.agent: {queue.agent!r}"
    if find_spec("verifiers") is None:
        raise UserCodeError(f"{field} needs {EXTRA}")
    try:
        agent = load_environment(name, is_scored=not queue.outcome)
        return agent, agent.tasks(evaluation, is_pool=queue.curriculum is not None)
    except UnplayableError as error:
        raise UserCodeError(f"{field}: {error}") from error


def _supervised_code(queue: Queue, evaluation: Evaluation) -> DomainCode:
    """Finished conversations, pass by pass; they are in no round of evaluation."""
    source = TaskFile(_file_tasks(queue, evaluation).training, (), evaluation=evaluation)
    return DomainCode(task_source=source, play=supervised.play, source="import")


def _task_file(queue: Queue, evaluation: Evaluation) -> TaskFile:
    found, is_pool = _file_tasks(queue, evaluation), queue.curriculum is not None
    return TaskFile(found.training, found.held_out, evaluation=evaluation, is_pool=is_pool)


def _file_tasks(queue: Queue, evaluation: Evaluation) -> FileTasks:
    try:
        return tasks_in_files(queue, evaluation)
    except TaskFileError as error:
        raise UserCodeError(str(error)) from error


def _function(name: str, *, field: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserCodeError(f"{field}: cannot load {name!r}: {error}") from error
    except SystemExit as error:
        raise UserCodeError(f"{field}: {name!r} ends its process as it is imported") from error
    if not callable(found):
        raise UserCodeError(f"{field}: {name!r} is not a function")
    return found  # type: ignore[no-any-return]  # any callable of the user; a wrong call raises
