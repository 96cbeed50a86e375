"""The Python that plays the agents, if a run names another one than that of its command."""

import subprocess
from collections.abc import Iterable
from importlib.machinery import ModuleSpec

import msgspec
from msgspec import Struct

from forgemq_contracts.environments import environment_of
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.module_search import Installed, installed_here

SETTING = "FORGEMQ_LAUNCHER_AGENTS_PYTHON"
AGENTS_FIELDS = ("task_source", "agent")
"""Fields of a queue whose functions the agents import."""

# Its answer comes after what packages print as they are imported. The folder that it is started in
# is left out here and not with -P, which a Python that is too old refuses without a reason.
_PROGRAM = """
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python %d.%d, and agents need 3.11 or newer" % sys.version_info[:2])
if not sys.path[0]:
    del sys.path[0]
import json
from importlib.util import find_spec
import forgemq_agents.app
specs = {name: find_spec(name) for name in sys.argv[1:]}
print()
print(json.dumps({
    name: {"origin": spec.origin, "is_file": spec.has_location,
           "locations": spec.submodule_search_locations and [*spec.submodule_search_locations]}
    for name, spec in specs.items() if spec is not None
}))
"""
ANSWERS_S_MAX = 60.0


class _Found(Struct, frozen=True):
    origin: str | None
    is_file: bool
    locations: list[str] | None


def installed_for_agents(python: str, made: RunConfiguration) -> Installed:
    """What finds the modules that are installed where the agents of this run play.

    Args:
        python: A Python; "" for that of this process.
        made: Its queues name the modules.

    Raises:
        ConfigurationError: it is no Python, or the package forgemq-agents is not installed there.
    """
    if not python:
        return installed_here
    found = _asked(python, {"verifiers", *_packages(made)})
    return lambda package: _spec(package, found[package]) if package in found else None


def _packages(made: RunConfiguration) -> Iterable[str]:
    for queue in made.queues:
        for field in AGENTS_FIELDS:
            name = getattr(queue, field)
            yield (environment_of(name) or name).partition(":")[0].partition(".")[0]


def _asked(python: str, packages: set[str]) -> dict[str, _Found]:
    try:
        answer = subprocess.run(
            [python, "-c", _PROGRAM, *sorted(packages - {"", "__main__"})],
            capture_output=True,
            timeout=ANSWERS_S_MAX,
            check=True,
        )
    except OSError as error:
        raise ConfigurationError(f"{SETTING}: {python} does not run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"{SETTING}: {python} gives no answer within {ANSWERS_S_MAX:.0f} s"
        ) from error
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"{SETTING}: {python} {_fault(error)}") from error
    try:
        return msgspec.json.decode(answer.stdout.splitlines()[-1], type=dict[str, _Found])
    except (IndexError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{SETTING}: {python} is no Python: it runs no program") from error


def _fault(error: subprocess.CalledProcessError) -> str:
    """What the program that failed tells about its Python."""
    said = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if said.startswith("ModuleNotFoundError: "):
        return f"has no agents service ({said}): install forgemq-agents there"
    return f"cannot play agents: {said or f'it ended with status {error.returncode}'}"


def _spec(package: str, found: _Found) -> ModuleSpec:
    spec = ModuleSpec(
        package, loader=None, origin=found.origin, is_package=found.locations is not None
    )
    spec.has_location = found.is_file
    if found.locations is not None:
        spec.submodule_search_locations = found.locations
    return spec
