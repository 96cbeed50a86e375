"""At least how many tokens a text has, without tokenising it."""

import json
import string
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

_WHITESPACE = bytes(string.whitespace, "ascii")
# A byte-level vocabulary writes the bytes up to the blank as the characters from 256 on.
_WITHOUT_WHITESPACE = {256 + byte: None for byte in _WHITESPACE}
_ALPHANUMERIC = bytes(string.ascii_letters + string.digits, "ascii")

# To count in a part of this length holds the interpreter for about a millisecond.
_PART_CHARACTERS = 1 << 20

# NFC makes three bytes of up to nine, and hides at most one ASCII letter in a composed character.
_COMPOSED_RATIO = 3


class TokenBound:
    """Lower bounds from the longest tokens of a byte-level vocabulary.

    A token holds at most so many bytes beside whitespace, and so many ASCII letters and digits;
    many more of them need many tokens. Whitespace is left out, because templates trim it.

    Args:
        tokenizer: If it is not byte-level, or changes text otherwise than by NFC, no text has a
            bound above 0.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._longest = _longest(tokenizer.get_vocab()) if _is_whole_bytewise(tokenizer) else None

    def tokens_min(self, texts: Iterable[str]) -> int:
        """A number of tokens that the texts, each rendered as it is, have at least."""
        if self._longest is None:
            return 0
        visible = alphanumeric = 0
        for text in texts:
            for start in range(0, len(text), _PART_CHARACTERS):
                part = text[start : start + _PART_CHARACTERS].encode("utf-8", "surrogatepass")
                visible += len(part.translate(None, _WHITESPACE))
                alphanumeric += len(part) - len(part.translate(None, _ALPHANUMERIC))
        return max(visible // self._longest[0], alphanumeric // self._longest[1])


def is_bytewise(tokenizer: Tokenizer) -> bool:
    """Whether the pieces of its vocabulary are bytes, each written as one character."""
    return "ByteLevel" in _types(tokenizer.decoder)


def _is_whole_bytewise(tokenizer: Tokenizer) -> bool:
    changes = _types(tokenizer.normalizer) - {"Sequence", "NFC"}
    return not changes and is_bytewise(tokenizer)


def _types(component: Any) -> set[str]:  # noqa: ANN401 - the package's, of any kind
    """Names of the types of a tokenizer's component and of those in it."""
    found: set[str] = set()
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        described = waiting.pop()
        found.add(described["type"])
        for inner in ("normalizers", "decoders"):
            waiting += described.get(inner, ())
    return found


def _longest(vocabulary: Iterable[str]) -> tuple[int, int]:
    """The most bytes beside whitespace, and the most letters and digits, that one token holds."""
    visible = alphanumeric = 1
    for token in vocabulary:
        if len(token) * _COMPOSED_RATIO <= visible and len(token) <= alphanumeric:
            continue
        # A byte-level vocabulary writes each byte as one character, printable ASCII as itself.
        bytewise = token.translate(_WITHOUT_WHITESPACE)
        letters = sum(character.isascii() and character.isalnum() for character in bytewise)
        others = sum(not character.isascii() for character in bytewise)
        visible = max(visible, len(bytewise) + (_COMPOSED_RATIO - 1) * others)
        alphanumeric = max(alphanumeric, letters + others)
    return visible, alphanumeric
