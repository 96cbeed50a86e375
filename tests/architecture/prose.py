"""Finds the text that people read in a file: sentences of code, pages, settings and documents."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

# Code spans that are more than a word, and targets of links.
NOT_PROSE = re.compile(r"`[^`]*[^`\w][^`]*`|\]\([^)]*\)")


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Each text in the file with the number of its first line."""
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            yield from _strings(ast.parse(text))
            yield from _joined(_python_comments(text))
        case ".md":
            yield from _paragraphs(text)
        case ".html" | ".js":
            yield from enumerate(text.splitlines(), 1)
        case _:
            yield from _joined(_hash_comments(text))


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, messages and descriptions; a value inside an f-string is `{}`."""
    parts = set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=values):
                parts.update(map(id, values))
                yield node.lineno, "".join(map(_part, values))
            case ast.Constant(value=str(text)) if id(node) not in parts and " " in text:
                yield node.lineno, text


def _part(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def _python_comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _hash_comments(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#") or " #" in line:
            yield number, line[line.index("#") :]


def _joined(comments: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Lines of one comment as one text."""
    start, last, words = 0, -1, list[str]()
    for line, comment in comments:
        if line != last + 1:
            yield start, " ".join(words)
            start, words = line, []
        words.append(comment.lstrip("# "))
        last = line
    yield start, " ".join(words)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and table rows of a Markdown file; code, file names and link targets left out."""
    is_code, start, words = False, 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        if is_fence or not line.strip() or line.startswith("|") or not words:
            yield start, " ".join(words)
            start, words = number, []
        is_code ^= is_fence
        if not is_code and not is_fence:
            words.append(NOT_PROSE.sub("", line.strip()))
