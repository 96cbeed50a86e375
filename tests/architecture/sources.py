"""The repository's files, and what the checks of them read most often: parsed once a process."""

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("contracts", "libs", "services", "deploy", "loadtests", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(
        path
        for folder in ("contracts", "deploy", "docs", "libs", "loadtests", "services", "tests")
        for path in sorted((ROOT / folder).rglob("*.md"))
    ),
]
SETTINGS_AND_PAGES = [
    path
    for folder in ("", "contracts", "deploy", "libs", "loadtests", "services", "tests")
    for suffix in ("html", "js", "properties", "sh", "toml", "yaml", "Dockerfile", "Makefile")
    for path in sorted((ROOT / folder).glob(f"{'**/' if folder else ''}*{suffix}"))
    if path.name != "asyncapi.yaml"  # Generated from the structs, whose descriptions are read.
]
SHIPPED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("contracts", "libs")]
SHIPPED += [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "services"]


class ClassOutline(NamedTuple):
    """A class statement: its name, the last names of its bases, whether it is in no other one."""

    name: str
    parents: tuple[str, ...]
    is_at_top: bool


class Outline(NamedTuple):
    """A file's functions, as (name, first line, last line), and its classes."""

    has_docstring: bool
    functions: tuple[tuple[str, int, int], ...]
    classes: tuple[ClassOutline, ...]


@cache
def outline(path: Path) -> Outline:
    """The outline of a file of Python."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return Outline(
        has_docstring=bool(ast.get_docstring(tree)),
        functions=tuple(
            (each.name, each.lineno, each.end_lineno or each.lineno) for each in functions(tree)
        ),
        classes=tuple(
            ClassOutline(each.name, tuple(map(last_name, each.bases)), each in tree.body)
            for each in classes
        ),
    )


def identity(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def problems_by_file(
    paths: Sequence[Path], problems: Callable[[Path], list[str]]
) -> dict[str, list[str]]:
    """What is wrong, by file. One test checks all files: one for each costs more than its check."""
    found = {identity(path): problems(path) for path in paths}
    return {path: wrong for path, wrong in found.items() if wrong}
