"""What is declared is imported, what is imported is declared, and the lock covers both."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "contracts", *sorted(ROOT.glob("libs/*")), *sorted(ROOT.glob("services/*"))]
PACKAGES = [folder for folder in PACKAGES if (folder / "pyproject.toml").exists()]
# Needed without an import of ours.
NOT_IMPORTED = {
    "import-linter": "run by `make lint`",
    "jgo": "run as a program, to fetch the broker's jars",
    "mypy": "run by `make lint`",
    "pytest-asyncio": "plug-in of pytest",
    "pytest-randomly": "plug-in of pytest",
    "pytest-timeout": "plug-in of pytest",
    "pytest-xdist": "plug-in of pytest",
    "ruff": "run by `make lint`",
    "s3fs": "loaded by fsspec for addresses that begin with s3://",
    "sophistry-bench-sprint": "loaded by verifiers, by the name of its module",
    "types-psutil": "read by mypy",
    "types-pyyaml": "read by mypy",
    "uv": "installs the environment",
    "uv-build": "builds the workspace's packages",
}
# One namespace, several distributions: the longest beginning decides.
OPENTELEMETRY = {
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.exporter.prometheus": "opentelemetry-exporter-prometheus",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry": "opentelemetry-api",
}
GROUP_FOLDERS = {
    "build": ("deploy/images",),
    "demo": ("deploy", "tests"),
    "test": ("tests", "loadtests"),
}


def normal(name: str) -> str:
    """The name of a distribution as indexes compare it, without extras and versions."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def declared(folder: Path) -> set[str]:
    table = project(folder)["project"]
    extras = table.get("optional-dependencies", {}).values()
    return {normal(name) for name in [*table["dependencies"], *(n for e in extras for n in e)]}


def optional() -> set[str]:
    """What the root's extras bring, which is imported only where it is installed."""
    extras = project(ROOT)["project"]["optional-dependencies"].values()
    return {normal(name) for extra in extras for name in extra}


def modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


@cache
def distributions() -> Mapping[str, list[str]]:
    """Who brings each importable name. Reading all installed metadata costs half a second."""
    return packages_distributions()


def distribution(module: str) -> str | None:
    """Who brings this module; None if Python does, or a folder of the repository."""
    top = module.partition(".")[0]
    if top == "opentelemetry":
        return next(name for start, name in OPENTELEMETRY.items() if module.startswith(start))
    found = distributions().get(top, [])
    return None if top in sys.stdlib_module_names or not found else normal(found[0])


@cache
def imported(folder: Path) -> frozenset[str]:
    """Distributions that the Python files below this folder import."""
    found = {distribution(name) for path in folder.rglob("*.py") for name in modules(path)}
    return frozenset(name for name in found if name is not None)


def third_party(names: set[str] | frozenset[str]) -> set[str]:
    return {name for name in names if not name.startswith("forgemq")}


@pytest.mark.slow
@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_a_package_declares_what_it_imports_and_imports_what_it_declares(folder: Path):
    own = project(folder)["project"]["name"]
    needs = set(imported(folder)) - {own}
    assert needs - declared(folder) == set(), "imported, not declared"
    unused = third_party(declared(folder) - needs) - NOT_IMPORTED.keys() - optional()
    assert unused == set(), "not imported"


def test_the_root_lists_what_the_packages_declare_and_nothing_else():
    wanted = set().union(*(third_party(declared(folder)) for folder in PACKAGES)) - optional()
    assert {normal(name) for name in project(ROOT)["project"]["dependencies"]} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted(project(ROOT)["dependency-groups"]))
def test_nothing_in_a_group_is_unused(group: str):
    names = {normal(name) for name in project(ROOT)["dependency-groups"][group]}
    used = {n for folder in GROUP_FOLDERS.get(group, ()) for n in imported(ROOT / folder)}
    assert names - used - NOT_IMPORTED.keys() == set()


@pytest.mark.slow
def test_tests_load_tests_and_the_demo_import_only_what_the_root_lists():
    listed = {normal(name) for name in project(ROOT)["project"]["dependencies"]}
    for group in project(ROOT)["dependency-groups"].values():
        listed |= {normal(name) for name in group}
    listed |= optional()
    used = {name for folder in ("tests", "loadtests", "deploy") for name in imported(ROOT / folder)}
    assert third_party(used) - listed == set()


def test_the_lock_pins_everything_that_the_root_lists():
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pinned = {normal(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", lock, re.MULTILINE)}
    table = project(ROOT)
    groups = table["dependency-groups"].values()
    listed = [*table["project"]["dependencies"], *(name for group in groups for name in group)]
    assert {normal(name) for name in listed} - pinned == set()
