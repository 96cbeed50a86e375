"""Checks of the code itself, after TigerBeetle's tidy.zig: style debates end here."""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.prose import prose_of

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
# Phrases that a reader stumbles over, each with what to write instead.
IDIOMS: dict[str, str] = {
    r"\banother than\b|\b(is|are) another\b(?! \w)|\banother one first\b": "differs from",
    r"\banew\b": "again",
    r"\bwhoever\b": "name who: the caller, a later process, any reader",
    r"\bforesaw\b": "an unexpected error",
    r"\bfor ever\b": "until it is cancelled; without end; always",
    r"(?<!\bthere )\b(is|are|was|were) none\b": "is not a <noun>; does not exist",
    r"\b(is|are) no way\b": "cannot be used; does not fall back to",
    r"\bone (?!or\b|and\b|is\b|are\b)\w+ (less|more)\b(?! than\b)": "add or remove one",
    r"\b(keeps?|keeping) company\b|\bkeep_company\b": "run an empty microbatch",
    r"\b(bury|buries|buried|burying)\b": "write a dead letter",
    r"\btold\b(?! apart)": "say what happens: is set, is notified, is called, reads",
    r"\b(is|are|was|were|be|been) said\b": "say who says it: the record has, the log says",
    r"\b(is|are|was|be) ours\b": "name the owner: this process, this attempt",
    r"\b(a|the|one|its|front|HTTP) door\b|\bdoors\b": "router; HTTP entry",
    r"\b(None|True|False|empty|0) where\b|(''|\"\") where\b": "if, not where",
    r"\bnone but\b": "only",
    r"\b[Ss]o (long an?\b|many seconds\b)|\b(waits?|for|after) so long\b": "this long, this many",
    r"\b[Ll]ikewise\b": "repeat the words, or: also",
    r"\bnot so\b": "name what is the case: failed",
    r"\b(sign of life|every now and then|at hand|need be|shall)\b": "the plain word",
    r"\bof which (no|none|nobody)\b": "without a <noun> that",
    r"\bours (is|are|was|were|has|have|do|does|did)\b": "name the owner: this process",
    r"\bhas none called\b": "has no <noun>",
    r"\bhears? (a|the|of|it|this|that|4\d\d|once|exactly|what)\b": "gets, is notified, reads",
    r"\blook(s|ed)? at at\b": "is checked at",
    r"\bof (its|their) own\b[^.;]*\bof (its|their) own\b": "`of its own` once a sentence at most",
    r"\babout nothing\b": "name what is missing",
    r"\b([Pp]ulse|[Aa]ttendance|[Ss]urroundings)\b": "change signal; episode player; context",
}
ANY_IDIOM = re.compile("|".join(f"(?:{idiom})" for idiom in IDIOMS))
ANY_EXCEPT = re.compile(r"except(:|\b.*Exception\b)")
# Between two lines of one comment, or of one text that the code writes in parts.
LINE_BREAK = re.compile(r"""["']?\s*\n\s*(?:#+|f?["'])?\s*""")
ANY_ERROR = {"Exception", "BaseException"}
# A comment with words in it, or a marker of the linter with a reason behind it.
A_REASON = re.compile(r"#(?! noqa| type:)|# noqa: \w+ - \S")
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


@cache
def our_parents() -> dict[str, list[str]]:
    """The parents of every class that is shipped, by its name."""
    return {
        node.name: parents(node)
        for path in SHIPPED
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }


def is_data_or_type(name: str) -> bool:
    """Whether only structs, protocols or exceptions are above this class."""
    above = our_parents().get(name, [])
    return bool(above) and all(
        parent in PURE_DATA_OR_TYPES
        or parent.endswith(("Error", "Exception"))
        or is_data_or_type(parent)
        for parent in above
    )


def problems_by_file(
    paths: Sequence[Path], problems: Callable[[Path], list[str]]
) -> dict[str, list[str]]:
    """What is wrong, by file. One test checks all files: one for each costs more than its check."""
    found = {identity(path): problems(path) for path in paths}
    return {path: wrong for path, wrong in found.items() if wrong}


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
    problems += [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines, limit {FUNCTION_LINES_MAX}"
        for node in functions(ast.parse(text))
        if (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    return problems


def test_a_file_is_named_for_its_content_and_short():
    assert problems_by_file(SOURCES, problems_of_shape) == {}


def broken_house_rules(path: Path) -> list[str]:
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
                if our_parents().get(parent) and not is_data_or_type(node.name)
            ]
    return problems


def test_shipped_code_keeps_the_house_rules():
    assert problems_by_file(SHIPPED, broken_house_rules) == {}


def phrases_to_avoid(path: Path) -> list[str]:
    if not ANY_IDIOM.search(LINE_BREAK.sub(" ", path.read_text(encoding="utf-8"))):
        return []  # Parsing costs more than this.
    joined = [(line, " ".join(paragraph.split())) for line, paragraph in prose_of(path)]
    return [
        f"line {line}: {found[0]!r}; write: {instead}"
        for line, paragraph in joined
        if ANY_IDIOM.search(paragraph)
        for idiom, instead in IDIOMS.items()
        for found in re.finditer(idiom, paragraph)
    ]


def test_prose_is_plain_english():
    paths = {*SOURCES, *DOCUMENTS, *SETTINGS_AND_PAGES} - {Path(__file__)}  # It quotes them.
    assert problems_by_file(sorted(paths), phrases_to_avoid) == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("code.py", 'raise ValueError(f"{name}: refused, whoever asks, {1}")'),
        ("code.py", '"""Rendered anew."""'),
        ("code.py", "field = 1  # Rendered\n# anew, it lasts for\n# ever."),
        ("page.md", "It is rendered\nanew, `and this is code`."),
        ("page.html", "<p>It is rendered anew.</p>"),
        ("page.js", 'note.textContent = "rendered anew";'),
        ("settings.toml", "limit = 1 # Rendered anew.\n"),
        ("Makefile", "# Rendered\n# anew.\nall:\n"),
    ],
)
def test_text_for_people_is_read_in_every_kind_of_file(tmp_path: Path, name: str, text: str):
    path = tmp_path / name
    path.write_text(text)
    assert phrases_to_avoid(path) != []


def test_names_and_keys_are_no_prose(tmp_path: Path):
    path = tmp_path / "code.py"
    path.write_text('NAMES = {"anew": whoever}\n')
    assert phrases_to_avoid(path) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Returns as soon as the state is another than the named one.",
        "None where there is none.",
        "It is rendered anew, whoever asks.",
        "One client less waits; nobody is told.",
        "The records that are none are buried.",
        "It lapses after so long a silence.",
        "The group of which no agent claims an episode ends likewise.",
    ],
)
def test_a_phrase_to_avoid_is_found(sentence: str):
    assert [idiom for idiom in IDIOMS if re.search(idiom, sentence)] != []


@pytest.mark.parametrize(
    "sentence",
    [
        "Returns as soon as the state changes; None if there is none.",
        "It would admit one group more than the bound allows.",
        "Rendered again. One client fewer waits, another one may come.",
        "Where the weights are is another question; two lanes can be told apart.",
    ],
)
def test_plain_english_passes(sentence: str):
    assert [idiom for idiom in IDIOMS if re.search(idiom, sentence)] == []


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
