"""Whether the code that a run names is on this machine; checked before anything starts."""

import difflib
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from forgemq_contracts.environments import EXTRA, environment_of
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_launcher.agents_python import AGENTS_FIELDS, installed_for_agents
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.module_search import (
    Installed,
    find_modules,
    hiding_module,
    installed_here,
    names_in,
)
from forgemq_launcher.task_files import FILES

FUNCTIONS = ("task_source", "agent", "outcome", "process", "speed")
"""Fields of a queue that name a `module:function`, or "" for none; agent: or an environment."""


def check_user_code(made: RunConfiguration, *, agents_python: str = "") -> None:
    """Refuse paths that lead nowhere, and functions that are in no module that Python finds.

    No code runs: modules are read. One whose text does not tell all of its names is left to the
    service that imports it.

    Args:
        made: The run.
        agents_python: Plays its agents; "" for the Python of this process.

    Raises:
        ConfigurationError: naming the field and what is missing.
    """
    for path in made.code_paths:
        if not Path(path).is_dir():
            raise ConfigurationError(f"code_paths: {path} is no folder")
    for queue in made.queues:
        for field in FILES:
            path = getattr(queue, field)
            if path and not Path(path).exists():
                raise ConfigurationError(f"queues.{queue.domain}.{field}: there is no {path}")
    for_agents = installed_for_agents(agents_python, made)
    for queue in made.queues:
        _check_environment(queue, code_paths=made.code_paths, installed=for_agents)
    for field, name in _functions(made):
        installed = for_agents if field.endswith(AGENTS_FIELDS) else installed_here
        _check_function(name, field=field, code_paths=made.code_paths, installed=installed)


def _check_function(
    name: str, *, field: str, code_paths: Sequence[str], installed: Installed
) -> None:
    module, _, function = name.partition(":")
    found = find_modules(module, code_paths=code_paths, installed=installed)
    if not found:
        package = module.partition(".")[0]
        is_there = find_modules(package, code_paths=code_paths, installed=installed)
        missing = module if is_there else package
        raise ConfigurationError(
            f"{field}: {name!r}: no module {missing!r} in code_paths or installed"
        )
    try:
        named = [names_in(each) for each in found]
    except SyntaxError as error:
        raise ConfigurationError(
            f"{field}: {name!r}: {error.filename}, line {error.lineno}: {error.msg}"
        ) from error
    having = [
        each
        for each, names in zip(found, named, strict=True)
        if names is None or not names.is_complete or function in names.bound
    ]
    if having:
        if _is_within(having[0], code_paths):
            _check_hidden(module, field=field, code_paths=code_paths, installed=installed)
        return
    known = frozenset[str]().union(*(each.called for each in named if each is not None))
    near = difflib.get_close_matches(function, sorted(known))
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    files = " or ".join(dict.fromkeys(str(each.origin) for each in found))
    raise ConfigurationError(f"{field}: {name!r}: there is no {function!r} in {files}{hint}")


def _check_environment(queue: Queue, *, code_paths: Sequence[str], installed: Installed) -> None:
    """Refuse an agent that is an environment, if the package or its module is not found."""
    environment, field = environment_of(queue.agent), f"queues.{queue.domain}.agent"
    if environment is None:
        return
    if installed("verifiers") is None:
        raise ConfigurationError(f"{field}: {queue.agent!r} needs {EXTRA}")
    if not find_modules(environment, code_paths=code_paths, installed=installed):
        raise ConfigurationError(
            f"{field}: {queue.agent!r}: no module {environment!r} in code_paths or installed"
        )
    _check_hidden(environment, field=field, code_paths=code_paths, installed=installed)


def _is_within(module: ModuleSpec, folders: Sequence[str]) -> bool:
    place = Path(module.origin or "")
    return any(place.is_relative_to(folder) for folder in folders)


def _check_hidden(
    module: str, *, field: str, code_paths: Sequence[str], installed: Installed
) -> None:
    """Refuse a module of the run's folders that Python does not come to."""
    place = hiding_module(module, code_paths=code_paths, installed=installed)
    if place:
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"{field}: the module {package!r} in code_paths is hidden by {place}, which Python "
            "finds first: give it another name"
        )


def _functions(made: RunConfiguration) -> Iterator[tuple[str, str]]:
    """Every field that names a function, and the name."""
    for queue in made.queues:
        for field in FUNCTIONS:
            name = getattr(queue, field)
            if name and environment_of(name) is None:
                yield f"queues.{queue.domain}.{field}", name
    if ":" in made.loss.kind:
        yield "loss.kind", made.loss.kind
