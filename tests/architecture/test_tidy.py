"""Checks of the code itself, after TigerBeetle's tidy.zig: style debates end here."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import (
    ROOT,
    SHIPPED,
    SOURCES,
    functions,
    identity,
    last_name,
    outline,
    problems_by_file,
)

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
ANY_EXCEPT = re.compile(r"except(:|\b.*Exception\b)")
ANY_ERROR = {"Exception", "BaseException"}
# A comment with words in it, or a marker of the linter with a reason behind it.
A_REASON = re.compile(r"#(?! noqa| type:)|# noqa: \w+ - \S")
PURE_DATA_OR_TYPES = {"Struct", "Protocol"}


@cache
def our_parents() -> dict[str, tuple[str, ...]]:
    """The parents of every class that is shipped, by its name."""
    return {each.name: each.parents for path in SHIPPED for each in outline(path).classes}


def is_data_or_type(name: str) -> bool:
    """Whether only structs, protocols or exceptions are above this class."""
    above = our_parents().get(name, ())
    return bool(above) and all(
        parent in PURE_DATA_OR_TYPES
        or parent.endswith(("Error", "Exception"))
        or is_data_or_type(parent)
        for parent in above
    )


def problems_of_shape(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    problems = []
    if BANNED_STEM.fullmatch(path.stem):
        problems.append(f"file name {path.name} says nothing about its content")
    if text.count("\n") > FILE_LINES_MAX:
        problems.append(f"{text.count(chr(10))} lines, limit {FILE_LINES_MAX}")
    if not text.isascii():
        line = next(i for i, row in enumerate(text.splitlines(), 1) if not row.isascii())
        problems.append(f"line {line} is not ASCII")
    return problems


def test_a_file_is_named_for_its_content_and_short():
    assert problems_by_file(SOURCES, problems_of_shape) == {}


def long_functions(path: Path) -> list[str]:
    return [
        f"{name}: {end - start + 1} lines, limit {FUNCTION_LINES_MAX}"
        for name, start, end in outline(path).functions
        if end - start + 1 > FUNCTION_LINES_MAX
    ]


@pytest.mark.slow
def test_functions_are_short():
    assert problems_by_file(SOURCES, long_functions) == {}


def broken_house_rules(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    has_docstring = outline(path).has_docstring or not text.strip()
    problems = [] if has_docstring else ["no module docstring"]
    problems += [f"marker without an issue: {found[0]}" for found in LEFT_OVER.finditer(text)]
    for name, parents, _ in outline(path).classes:
        if BANNED_CLASS.search(name):
            problems.append(f"class {name}: name the thing, not its role")
        problems += [
            f"class {name} inherits behaviour from our own {parent}"
            for parent in parents
            if our_parents().get(parent) and not is_data_or_type(name)
        ]
    return problems


@pytest.mark.slow
def test_shipped_code_keeps_the_house_rules():
    assert problems_by_file(SHIPPED, broken_house_rules) == {}


def broad_excepts_without_a_reason(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if not ANY_EXCEPT.search(text):
        return []  # Parsing is what costs.
    handlers = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ExceptHandler))
    return [
        f"line {handler.lineno} catches any error; name them, or say beside it why any may come"
        for handler in handlers
        if ANY_ERROR & {last_name(kind) for kind in caught_by(handler)}
        and not A_REASON.search(" ".join(lines[handler.lineno - 1 : handler.lineno + 1]))
    ]


def caught_by(handler: ast.ExceptHandler) -> list[ast.expr]:
    if handler.type is None:
        return [ast.Name("BaseException")]
    return handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]


def test_code_that_catches_any_error_says_why():
    paths = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]
    assert problems_by_file(paths, broad_excepts_without_a_reason) == {}


@pytest.mark.parametrize(
    ("comment", "count"),
    [("", 1), ("  # noqa: BLE001", 1), ("  # noqa: BLE001 - user code", 0), ("\n    # Why.", 0)],
)
def test_a_broad_except_needs_more_than_a_marker(tmp_path: Path, comment: str, count: int):
    path = tmp_path / "code.py"
    path.write_text(f"try:\n    f()\nexcept (OSError, Exception):{comment}\n    raise\n")
    assert len(broad_excepts_without_a_reason(path)) == count


@pytest.mark.slow
def test_a_class_name_means_one_thing():
    packages: dict[str, set[str]] = {}
    for path in SHIPPED:
        package = "/".join(path.relative_to(ROOT).parts[:2])
        for name, _, is_at_top in outline(path).classes:
            if is_at_top and not name.startswith("_"):
                packages.setdefault(name, set()).add(package)
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


def fast_tests_by_mistake(path: Path) -> list[str]:
    """Tests without a marker that keeps them out of the fast suite."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = [n for n in tree.body if isinstance(n, ast.Assign) and names_a_marker(n)]
    tests = [node for node in functions(tree) if node.name.startswith("test_")]
    lost = [test.name for test in tests if not any(map(names_a_marker, test.decorator_list))]
    return [] if whole else lost


def names_a_marker(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return any(
        f"pytest.mark.{marker}" in text
        for marker in ("integration", "slow", "gpu", "clients", "containers", "cluster")
    )


def test_folders_that_the_fast_suite_does_not_load_hold_none_of_its_tests():
    skipped = re.findall(r"--ignore=(\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    folders = ("gpu", "integration", "clients", "containers", "cluster")
    assert skipped == [f"tests/{folder}" for folder in folders]
    paths = [path for folder in skipped for path in sorted((ROOT / folder).rglob("test_*.py"))]
    assert problems_by_file(paths, fast_tests_by_mistake) == {}


def lines_that_wait(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        f"line {node.lineno} waits"
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef | ast.Await)
    ]


def test_no_core_waits():
    cores = [path for path in SHIPPED if "core" in path.relative_to(ROOT).with_suffix("").parts]
    assert problems_by_file(cores, lines_that_wait) == {}
