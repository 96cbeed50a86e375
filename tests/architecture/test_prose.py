"""Checks of the words: in code, pages, settings and documents they are plain English."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.architecture.prose import prose_of
from tests.architecture.sources import DOCUMENTS, SETTINGS_AND_PAGES, SOURCES, problems_by_file

WORD = re.compile(r"\w+")
# Between two lines of one comment, or of one text that the code writes in parts.
LINE_BREAK = re.compile(r"""["']?\s*\n\s*(?:#+|f?["'])?\s*""")
# Phrases that a reader stumbles over, each with what to write instead. A text without any of the
# words before a phrase does not have it: looking for the phrase costs more.
IDIOMS: Sequence[tuple[str, str, str]] = (
    (
        "another",
        r"\banother than\b|\b(is|are) another\b(?! \w)|\banother one first\b",
        "differs from",
    ),
    ("anew", r"\banew\b", "again"),
    ("whoever", r"\bwhoever\b", "name who: the caller, a later process, any reader"),
    ("foresaw", r"\bforesaw\b", "an unexpected error"),
    ("ever", r"\bfor ever\b", "until it is cancelled; without end; always"),
    (
        "none",
        r"(?<!\bthere )\b(is|are|was|were) none\b",
        "is not a <noun>; does not exist",
    ),
    ("way", r"\b(is|are) no way\b", "cannot be used; does not fall back to"),
    (
        "less more",
        r"\bone (?!or\b|and\b|is\b|are\b)\w+ (less|more)\b(?! than\b)",
        "add or remove one",
    ),
    (
        "company keep_company",
        r"\b(keeps?|keeping) company\b|\bkeep_company\b",
        "run an empty microbatch",
    ),
    (
        "bury buries buried burying",
        r"\b(bury|buries|buried|burying)\b",
        "write a dead letter",
    ),
    (
        "told",
        r"\btold\b(?! apart)",
        "say what happens: is set, is notified, is called, reads",
    ),
    (
        "said",
        r"\b(is|are|was|were|be|been) said\b",
        "say who says it: the record has, the log says",
    ),
    ("ours", r"\b(is|are|was|be) ours\b", "name the owner: this process, this attempt"),
    ("door doors", r"\b(a|the|one|its|front|HTTP) door\b|\bdoors\b", "router; HTTP entry"),
    ("where", r"\b(None|True|False|empty|0) where\b|(''|\"\") where\b", "if, not where"),
    ("none", r"\bnone but\b", "only"),
    (
        "long many",
        r"\b[Ss]o (long an?\b|many seconds\b)|\b(waits?|for|after) so long\b",
        "this long, this many",
    ),
    ("Likewise likewise", r"\b[Ll]ikewise\b", "repeat the words, or: also"),
    ("so", r"\bnot so\b", "name what is the case: failed"),
    (
        "sign now hand need shall",
        r"\b(sign of life|every now and then|at hand|need be|shall)\b",
        "the plain word",
    ),
    ("which", r"\bof which (no|none|nobody)\b", "without a <noun> that"),
    (
        "ours",
        r"\bours (is|are|was|were|has|have|do|does|did)\b",
        "name the owner: this process",
    ),
    ("called", r"\bhas none called\b", "has no <noun>"),
    (
        "hear hears",
        r"\bhears? (a|the|of|it|this|that|4\d\d|once|exactly|what)\b",
        "gets, is notified, reads",
    ),
    ("look looks looked", r"\blook(s|ed)? at at\b", "is checked at"),
    (
        "own",
        r"\bof (its|their) own\b[^.;]*\bof (its|their) own\b",
        "`of its own` once a sentence at most",
    ),
    ("nothing", r"\babout nothing\b", "name what is missing"),
    (
        "Pulse pulse Attendance attendance Surroundings surroundings",
        r"\b([Pp]ulse|[Aa]ttendance|[Ss]urroundings)\b",
        "change signal; episode player; context",
    ),
)


def phrases_to_avoid(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    suspects = idioms_in(LINE_BREAK.sub(" ", text))
    if not suspects:
        return []  # Parsing costs more than this.
    joined = [(line, " ".join(paragraph.split())) for line, paragraph in prose_of(path)]
    return [
        f"line {line}: {found[0]!r}; write: {instead}"
        for line, paragraph in joined
        for _, idiom, instead in suspects
        for found in re.finditer(idiom, paragraph)
    ]


def idioms_in(text: str) -> list[tuple[str, str, str]]:
    words = set(WORD.findall(text))
    possible = (each for each in IDIOMS if not words.isdisjoint(each[0].split()))
    return [each for each in possible if re.search(each[1], text)]


@pytest.mark.slow
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
    assert idioms_in(sentence) != []


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
    assert idioms_in(sentence) == []
