"""Whether the code that a run names is on this machine; checked before anything starts."""

from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from forgemq_contracts.environments import EXTRA, environment_of
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_launcher.core.configuration import ConfigurationError

FUNCTIONS = ("task_source", "agent", "outcome", "process", "speed")
"""Fields of a queue that name a `module:function`, or "" for none; agent: or an environment."""

FILES = ("task_file", "held_out_file")
"""Fields of a queue that name a file or folder, or "" for none."""


def check_user_code(made: RunConfiguration) -> None:
    """Refuse paths that lead nowhere, and functions whose module Python does not find.

    No code runs: whether a module has the function is known once the service that needs it starts.

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
    for queue in made.queues:
        _check_environment(queue, code_paths=made.code_paths)
    for field, name in _functions(made):
        package = name.partition(":")[0].partition(".")[0]
        if not _is_found(package, code_paths=made.code_paths):
            raise ConfigurationError(
                f"{field}: {name!r}: no module {package!r} in code_paths or installed"
            )


def _check_environment(queue: Queue, *, code_paths: Sequence[str]) -> None:
    """Refuse an agent that is an environment, if the package or its module is not found."""
    environment, field = environment_of(queue.agent), f"queues.{queue.domain}.agent"
    if environment is None:
        return
    if find_spec("verifiers") is None:
        raise ConfigurationError(f"{field}: {queue.agent!r} needs {EXTRA}")
    if not _is_found(environment, code_paths=code_paths):
        raise ConfigurationError(
            f"{field}: {queue.agent!r}: no module {environment!r} in code_paths or installed"
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


def _is_found(package: str, *, code_paths: Sequence[str]) -> bool:
    # Services also import from the folder that they are started in.
    if PathFinder.find_spec(package, [*code_paths, str(Path.cwd())]) is not None:
        return True
    return find_spec(package) is not None
