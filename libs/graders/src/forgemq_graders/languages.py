"""A process reward against answers that slip into another script."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from forgemq_contracts.grading import GradingEpisode

# By the first word of a letter's Unicode name. Greek is not among them: formulas are written in it.
_SCRIPTS = frozenset(
    {
        *("LATIN", "CYRILLIC", "ARMENIAN", "GEORGIAN", "HEBREW", "ARABIC", "DEVANAGARI"),
        *("BENGALI", "GURMUKHI", "GUJARATI", "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA"),
        *("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "ETHIOPIC", "HANGUL"),
        *("CJK", "HIRAGANA", "KATAKANA"),
    }
)
_KANA = frozenset({"HIRAGANA", "KATAKANA"})
_JAPANESE = _KANA | {"CJK"}
_DISPLAYS = "equation|align|gather|multline"
_MATHEMATICS = re.compile(
    r"\$\$[^$]+\$\$"
    r"|\$(?=\S)[^$\n]+(?<=\S)\$(?!\d)"  # Not the text between two prices.
    r"|\\\((?:(?!\\[()]).)+\\\)"
    r"|\\\[(?:(?!\\[\[\]]).)+\\\]"
    rf"|\\begin\{{({_DISPLAYS})(\*?)\}}(?:(?!\\begin\{{(?:{_DISPLAYS})\*?\}}).)+?\\end\{{\1\2\}}"
    r"|\\boxed\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
    r"|\\[A-Za-z]+"  # Any command outside of it.
    r"|(?<![A-Za-z\u00c0-\u024f])[A-Za-z](?![A-Za-z\u00c0-\u024f])",  # The name of a variable.
    re.DOTALL,
)
"""What is written in Latin letters in all languages. A part that begins again before its end is not
taken, so that a text with many beginnings is read once."""

_CACHED_CHARACTERS = 16_384
"""More than the letters of any few languages; a name is looked up once for each."""


def language_mixing(episode: GradingEpisode) -> Sequence[float]:
    """Minus the share of a completion's letters in a script that nobody has written to it before.

    What was written to it are the messages of system, user and tools so far; what the policy itself
    wrote is not. Kana stands for all scripts of Japanese. 0 for a completion without letters.
    Mathematics, commands of LaTeX and Latin letters that stand alone count for nothing, in what was
    written to it too.
    Source: language consistency, DeepSeek-R1, arXiv 2501.12948 section 2.3.2; differs: by script,
    so that two languages of one script are not told apart.
    """
    allowed: set[str] = set()
    values = []
    for completion in episode.completions:
        for text in _texts(completion.messages_before):
            allowed.update(_scripts(text))
        if allowed & _KANA:
            allowed |= _JAPANESE
        values.append(-_foreign(completion.text, allowed))
    return values


def _foreign(text: str, allowed: set[str]) -> float:
    scripts = list(_scripts(text))
    return sum(script not in allowed for script in scripts) / len(scripts) if scripts else 0.0


def _texts(messages: Sequence[Any]) -> Iterator[str]:
    """The texts of messages, whose content is a string or a list of parts."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (str(part["text"]) for part in content if _is_text(part))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _scripts(text: str) -> Iterator[str]:
    """The script of each letter that has one of `_SCRIPTS`, without those of mathematics."""
    for character in _MATHEMATICS.sub(" ", text):
        if character.isalpha() and (script := _script(character)):
            yield script


@lru_cache(maxsize=_CACHED_CHARACTERS)
def _script(character: str) -> str:
    script = unicodedata.name(character, "").partition(" ")[0]
    return script if script in _SCRIPTS else ""
