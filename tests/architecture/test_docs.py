"""What the documents name exists: links, files, functions, commands, settings, defaults."""

import ast
import importlib
import importlib.util
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_telemetry.catalogue import COUNTERS, GAUGES, HISTOGRAMS

ROOT = Path(__file__).parents[2]
FOLDERS = ("contracts", "deploy", "docs", "libs", "loadtests", "services", "tests")
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))),
]
FILES = {
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if "__pycache__" not in path.parts
} | {path.name for path in ROOT.iterdir()}
# Files that a run makes or the reader brings.
NOT_IN_THE_TREE = {
    "configuration.json",
    "pass_at_k.json",
    "report.json",
    "tasks.json",
    "learning.json",
    "blobs/weights",
}
OF_THE_READER = re.compile(r"^(\.\.\.|my|my_project)/")
# Variables outside all settings structs: the shell, the launcher or the tests read them.
OTHER_VARIABLES = {
    "FORGEMQ_RUN",
    "FORGEMQ_KAFKA",
    "FORGEMQ_BLOBS",
    "FORGEMQ_ENGINE_URL",
    "FORGEMQ_TEST_BROKER",
    "FORGEMQ_TEST_CLIENTS_LOG",
    "FORGEMQ_ENGINE_WEIGHT_GROUP_TIMEOUT_S",
}
SETTINGS = {
    "FORGEMQ_TELEMETRY_": ("forgemq_telemetry.settings", "TelemetrySettings"),
    "FORGEMQ_TRANSFORM_": ("forgemq_shell.transform_settings", "TransformSettings"),
    "FORGEMQ_SERVICE_": ("forgemq_shell.service", "ServiceSettings"),
    "FORGEMQ_KAFKA_": ("forgemq_shell.connection", "KafkaSettings"),
    "FORGEMQ_NODES_": ("forgemq_trainer.ranks.nodes", "NodesSettings"),
    **{
        f"FORGEMQ_{path.name.upper()}_": (
            f"forgemq_{path.name}.settings",
            f"{path.name.title()}Settings",
        )
        for path in (ROOT / "services").iterdir()
        if (path / "pyproject.toml").exists()
    },
}


METRICS = {*COUNTERS, *GAUGES, *HISTOGRAMS}
COMMANDS = set(
    re.findall(
        r'add_parser\(\s*"([a-z-]+)"',
        (ROOT / "services/launcher/src/forgemq_launcher/arguments.py").read_text(),
    )
)
SECTIONS = {
    field.name: field.type
    for field in msgspec.structs.fields(RunConfiguration)
    if isinstance(field.type, type)
} | {"queues": Queue}


ARCHITECTURE = ROOT / "docs" / "architecture.md"
# `core/window.py:WindowedFifo.take`, linked or not; a link says which file is meant.
FUNCTION = re.compile(r"(\[)?`([\w./-]+\.py):([A-Za-z_][\w.]*)`(?(1)\]\(([^)#\s]+)\))")
BEHAVIOURS_MIN = 20


def identity(path: Path) -> str:
    return str(path.relative_to(ROOT))


def defaults() -> dict[str, object]:
    """Default of each environment variable of a settings struct; NODEFAULT if it must be set."""
    found: dict[str, object] = {}
    for prefix, (module, name) in SETTINGS.items():
        struct = getattr(importlib.import_module(module), name)
        for field in msgspec.structs.fields(struct):
            found[prefix + field.name.upper()] = field.default
    return found


DEFAULTS = defaults()


def spans(text: str) -> Iterator[str]:
    """All that a document shows as code: spans, and fenced or indented lines."""
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    rest = re.sub(r"^```[^\n]*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (line for line in rest.splitlines() if line.startswith("    "))
    yield from re.findall(r"`([^`\n]+)`", rest)


@pytest.mark.parametrize("path", DOCUMENTS, ids=identity)
def test_every_relative_link_leads_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    lost = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert lost == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=identity)
def test_every_file_that_is_named_is_in_the_tree(path: Path):
    """A file is named by its path from the root or the document, or by the end of its path."""
    lost = []
    for span in re.findall(r"`([^`\n]+)`", path.read_text()):
        if "://" in span or "<" in span:
            continue
        pattern = r"[\w./-]+/[\w./-]*\w|[\w-]+\.(?:py|toml|yaml|json|md|sh|js)\b"
        for name in re.findall(pattern, span):
            is_known = name in NOT_IN_THE_TREE or OF_THE_READER.match(name)
            if is_known or name.startswith(("/", "v1/", "s/")):
                continue
            if (path.parent / name).exists() or name in FILES:
                continue
            if not any(file.endswith("/" + name) for file in FILES):
                lost.append(name)
    assert lost == []


@cache
def definitions(path: Path) -> set[str]:
    """Functions and classes of a module by their names, methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (ast.FunctionDef, ast.AsyncFunctionDef)
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, methods)}
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=identity)
def test_every_function_that_is_named_exists(path: Path):
    """`file.py:function` and `file.py:Class.method`, in the linked file or in one of that name."""
    lost = []
    for _, name, function, link in FUNCTION.findall(path.read_text()):
        if link:
            files = [(path.parent / link).resolve()]
        else:
            files = [ROOT / file for file in FILES if f"/{file}".endswith(f"/{name}")]
        is_there = any(
            f"/{file}".endswith(f"/{name}") and function in definitions(file)
            for file in files
            if file.exists()
        )
        if not is_there:
            lost.append(f"{name}:{function}")
    assert lost == []


def behaviour_rows() -> list[str]:
    """Rows of all tables under "Where is ..." of the architecture page, without their heads."""
    _, _, section = ARCHITECTURE.read_text().partition("\n## Where is ...\n")
    lines = section.splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    heads = [line for line, below in itertools.pairwise(lines) if below.startswith("|--")]
    return [row for row in rows if row not in heads]


def test_the_architecture_page_says_where_at_least_20_behaviours_are():
    assert len(behaviour_rows()) >= BEHAVIOURS_MIN


def test_every_behaviour_is_linked_to_the_file_of_its_function():
    linked = {row: [link for *_, link in FUNCTION.findall(row) if link] for row in behaviour_rows()}
    assert [row for row, links in linked.items() if not links] == []
    assert [link for links in linked.values() for link in links if not link.startswith("../")] == []


@pytest.mark.parametrize("path", sorted((ROOT / "services").glob("*/README.md")), ids=identity)
def test_every_service_leads_to_the_architecture_page(path: Path):
    assert "](../../docs/architecture.md)" in path.read_text()


@pytest.mark.parametrize("path", DOCUMENTS, ids=identity)
def test_every_variable_that_is_named_is_a_setting(path: Path):
    text = path.read_text()
    named = {name.rstrip("_") for name in re.findall(r"FORGEMQ_[A-Z0-9_]+\b(?!<)", text)}
    unknown = named - DEFAULTS.keys() - OTHER_VARIABLES
    # `FORGEMQ_TRAINER_ALARM_*` names all variables that begin like this.
    families = {name for name in unknown if any(k.startswith(name + "_") for k in DEFAULTS)}
    assert unknown - families == set()
    short = {name for span in spans(text) for name in re.findall(r"^_([A-Z][A-Z0-9_]+)$", span)}
    endings = {known.removeprefix(prefix) for prefix in SETTINGS for known in DEFAULTS}
    assert short - {name for name in endings if not name.startswith("FORGEMQ_")} == set()


def test_every_setting_is_on_a_page():
    """By its whole name, or by its end (`_PORT`) in a line that has its beginning."""
    lines = [line for path in DOCUMENTS for line in path.read_text().splitlines()]
    named = {name for line in lines for name in re.findall(r"FORGEMQ_[A-Z0-9_]+", line)}
    for line in lines:
        ends = re.findall(r"`(_[A-Z0-9_]+)`", line)
        begins = [
            prefix.removesuffix("_") for prefix in SETTINGS if prefix.removesuffix("_") in line
        ]
        named |= {begin + end for begin in begins for end in ends}
    assert sorted(DEFAULTS.keys() - named) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=identity)
def test_a_default_in_a_table_is_that_of_the_setting(path: Path):
    rows = re.findall(r"^\| `(FORGEMQ_[A-Z0-9_]+)` \| ([^|]+) \|", path.read_text(), re.MULTILINE)
    for name, said in rows:
        if name in OTHER_VARIABLES:
            continue
        default = DEFAULTS[name]
        said = said.strip().strip("`")
        if default is msgspec.NODEFAULT:
            assert re.search("required|must be set", said), f"{name} has no default, said: {said}"
        elif isinstance(default, bool):
            assert said == str(default).lower(), name
        elif isinstance(default, int | float):
            assert number(said) == default, name
        elif isinstance(default, tuple):
            assert said == ",".join(default), name
        elif default:
            assert said == default, name


def number(text: str) -> float:
    """The number in `4 GB`, `64 MiB` or `30`, in bytes if the unit says so."""
    value, _, unit = text.partition(" ")
    return float(value.replace(",", "")) * {"": 1, "s": 1, "GB": 10**9, "MiB": 2**20}[unit]


@pytest.mark.parametrize("path", DOCUMENTS, ids=identity)
def test_every_command_that_is_shown_exists(path: Path):
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lost = []
    for span in spans(path.read_text()):
        lost += [name for name in re.findall(r"^\s*make ([a-z-]+)", span) if name not in verbs]
        shown = re.findall(r"(?:^|[\s/])forgemq ([a-z-]+)\b", span.partition("#")[0])
        lost += [name for name in shown if name not in COMMANDS]
        for module in re.findall(r"-m (forgemq(?:\.\w+)+)", span):
            found = importlib.util.find_spec(module)
            if found is None:
                lost.append(module)
    assert lost == []


def test_a_shown_tail_takes_the_logs_of_several_lanes():
    """`tail -30 FILE FILE` is refused: that form takes one file."""
    shown = [span for path in DOCUMENTS for span in spans(path.read_text())]
    assert [span for span in shown if re.search(r"\b(head|tail) -[0-9]", span)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=identity)
def test_every_key_of_a_run_that_is_named_is_a_field(path: Path):
    lost = []
    for span in re.findall(r"`([^`\n]+)`", path.read_text()):
        for section, rest in re.findall(r"(?<![\w./])([a-z]+)\.([a-z_0-9.]+)", span):
            is_metric = f"{section}.{rest}" in METRICS
            if section in SECTIONS and not is_metric and not is_key(section, rest):
                lost.append(f"{section}.{rest}")
    assert lost == []


ENDINGS = {"py", "toml", "md", "safetensors"}


def is_key(section: str, rest: str) -> bool:
    """Whether this is a field of a run's section, or a file name, which is not checked here."""
    parts = [part for part in rest.split(".") if part]
    if parts[-1] in ENDINGS:
        return True
    if section == "queues" and len(parts) > 1:
        parts = parts[1:]  # leave out the queue's number or domain
    return parts[0] in {field.name for field in msgspec.structs.fields(SECTIONS[section])}
