"""Finds the modules that a dotted name may mean, and reads them; imports nothing."""

import os
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from forgemq_launcher.core.module_names import ModuleNames, module_names

Installed: TypeAlias = Callable[[str], ModuleSpec | None]
"""Finds an installed package by its name."""


def find_modules(
    name: str, *, code_paths: Sequence[str], installed: Installed
) -> tuple[ModuleSpec, ...]:
    """Every module of this name that a service may import; () if there is certainly none.

    Args:
        name: Dotted.
        code_paths: Folders of the run.
        installed: Finds a package that is installed where the service runs.
    """
    package, *parts = name.split(".")
    if package == "__main__":
        return ()  # A service has its own.
    # Services also import from the folder that they are started in.
    local = PathFinder.find_spec(package, [*code_paths, str(Path.cwd())])
    found = tuple(each for each in (local, installed(package)) if each is not None)
    for number, part in enumerate(parts, start=1):
        found = tuple(
            inner
            for outer in found
            if (inner := _inside(outer, ".".join((package, *parts[:number])), part)) is not None
        )
    return found


def hiding_module(name: str, *, code_paths: Sequence[str], installed: Installed) -> str:
    """Where Python finds a module in place of that in the run's folders; "" if it takes theirs.

    Args:
        name: Dotted.
        code_paths: Folders of the run, which come behind all others. They may lack the module.
        installed: As of `find_modules`.
    """
    package = name.partition(".")[0]
    own = PathFinder.find_spec(package, code_paths)
    local = PathFinder.find_spec(package, [str(Path.cwd())])
    others = [each for each in (local, installed(package)) if each is not None and each.origin]
    if own is None or not others or _place(others[0]) == _place(own):
        return ""
    return _place(others[0])


def _place(module: ModuleSpec) -> str:
    """The file of a module, links followed; "" for a folder without a module of its own."""
    return os.path.realpath(module.origin or "") if module.has_location else module.origin or ""


def names_in(module: ModuleSpec) -> ModuleNames | None:
    """The names of a module; None if it has no source that can be read.

    Raises:
        SyntaxError: Python does not take its source; names the file.
    """
    path = Path(module.origin or "")
    if not module.has_location or path.suffix != ".py" or not path.is_file():
        return None
    try:
        return module_names(path.read_bytes())
    except SyntaxError as error:
        error.filename = str(path)
        raise


def installed_here(package: str) -> ModuleSpec | None:
    """A package that this process would import; None if there is none."""
    try:
        return find_spec(package)
    except ValueError:
        return None  # A module of this process that came from no file.


def _inside(outer: ModuleSpec, name: str, part: str) -> ModuleSpec | None:
    """The module `part` of another one; without a source if only an import can tell."""
    locations = outer.submodule_search_locations
    if locations is not None and (found := PathFinder.find_spec(name, locations)) is not None:
        return found
    is_plain_folder = locations is not None and outer.origin is None
    if is_plain_folder:
        return None
    try:
        named = names_in(outer)
    except SyntaxError:
        return outer  # Whose error says more.
    is_certain = named is not None and named.is_complete and part not in named.bound
    return None if is_certain else ModuleSpec(name, loader=None)
