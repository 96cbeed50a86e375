"""Checks of the code itself, after TigerBeetle's tidy.zig: style debates end here."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("contracts", "libs", "services", "deploy", "loadtests", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
SHIPPED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("contracts", "libs")]
SHIPPED += [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "services"]
SERVICES = sorted(path for path in (ROOT / "services").iterdir() if path.is_dir())
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
MAIN_LINES_MAX = 15
BANNED_STEM = re.compile(
    r"utils?|helpers?|common|misc|base|manager|factory|types|wrappers?|handlers?"
)
BANNED_CLASS = re.compile(r"(Manager|Factory|Helper|Utils?|Impl|Wrapper|Handler)$")
# Markers of unfinished work; allowed only with an issue number.
LEFT_OVER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(\d+\))")
PURE_DATA_OR_TYPES = {"Struct", "Protocol"}


def identity(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def parents(node: ast.ClassDef) -> list[str]:
    return [last_name(parent) for parent in node.bases]


OUR_PARENTS = {
    node.name: parents(node)
    for path in SHIPPED
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.ClassDef)
}


def is_data_or_type(name: str) -> bool:
    """Whether only structs, protocols or exceptions are above this class."""
    above = OUR_PARENTS.get(name, [])
    return bool(above) and all(
        parent in PURE_DATA_OR_TYPES
        or parent.endswith(("Error", "Exception"))
        or is_data_or_type(parent)
        for parent in above
    )


@pytest.mark.parametrize("path", SOURCES, ids=identity)
def test_a_file_is_named_for_its_content_and_short(path: Path):
    text = path.read_text(encoding="utf-8")
    problems = []
    if BANNED_STEM.fullmatch(path.stem):
        problems.append(f"file name {path.name} says nothing about its content")
    if text.count("\n") > FILE_LINES_MAX:
        problems.append(f"{text.count(chr(10))} lines, limit {FILE_LINES_MAX}")
    if not text.isascii():
        line = next(i for i, row in enumerate(text.splitlines(), 1) if not row.isascii())
        problems.append(f"line {line} is not ASCII")
    problems += [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines, limit {FUNCTION_LINES_MAX}"
        for node in functions(ast.parse(text))
        if (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert problems == []


@pytest.mark.parametrize("path", SHIPPED, ids=identity)
def test_shipped_code_keeps_the_house_rules(path: Path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    problems = [] if ast.get_docstring(tree) or not text.strip() else ["no module docstring"]
    problems += [f"marker without an issue: {found[0]}" for found in LEFT_OVER.finditer(text)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if BANNED_CLASS.search(node.name):
                problems.append(f"class {node.name}: name the thing, not its role")
            problems += [
                f"class {node.name} inherits behaviour from our own {parent}"
                for parent in parents(node)
                if OUR_PARENTS.get(parent) and not is_data_or_type(node.name)
            ]
    assert problems == []


def test_a_class_name_means_one_thing():
    packages: dict[str, set[str]] = {}
    for path in SHIPPED:
        package = "/".join(path.relative_to(ROOT).parts[:2])
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                packages.setdefault(node.name, set()).add(package)
    shared = {name: sorted(found) for name, found in packages.items() if len(found) > 1}
    assert shared == {}


def test_every_package_names_the_licence_of_the_repository():
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()[1]
    licences = {
        identity(path): tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("license")
        for folder in ("contracts", "libs", "services")
        for path in (ROOT / folder).rglob("pyproject.toml")
    }
    assert {path: name for path, name in licences.items() if name != "Apache-2.0"} == {}


@pytest.mark.parametrize("folder", SERVICES, ids=lambda path: path.name)
def test_every_service_has_the_same_anatomy(folder: Path):
    package = folder / "src" / f"forgemq_{folder.name}"
    names = {path.name for path in package.iterdir()}
    missing = {"__main__.py", "settings.py", "app.py", "py.typed"} - names
    if not names & {"core.py", "core"}:
        missing.add("core.py or core/")
    assert missing == set()
    main = (package / "__main__.py").read_text(encoding="utf-8")
    assert main.count("\n") <= MAIN_LINES_MAX
    assert (folder / "README.md").exists()


@pytest.mark.parametrize(
    "path",
    [path for path in SHIPPED if "core" in path.relative_to(ROOT).with_suffix("").parts],
    ids=identity,
)
def test_a_core_neither_waits_nor_logs(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    waits = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef | ast.Await)]
    assert waits == []
