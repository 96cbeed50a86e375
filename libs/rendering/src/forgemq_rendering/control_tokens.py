"""Control tokens in what people and tools wrote: their text, never the tokens themselves.

A chat template gives structure by control tokens (`<|im_end|>`), and a tokenizer finds them in any
text: a tool's result could otherwise end its message and begin one of the system's. So `shield`
puts a mark inside each one in a message's content before the template is applied, and `parts`
takes the marks out again: what stood left and right of a mark is tokenised apart, so that no
control token is found, and the text stays the same to the byte.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Two of the code points that Unicode keeps for a program's own use and never assigns.
_CUT = "\ufdd0\ufdd1"

# Added tokens that are no control token are runs of blanks and whole words.
_MARKUP = re.compile(r"<\S+>|\[/?[A-Z_]+\]")

# The model's own reasoning, which templates find in the text of its earlier messages.
_REASONING = ("<think>", "</think>")


class ControlTokens:
    """The control tokens of one tokenizer.

    Args:
        texts: Text of each added token, and whether the tokenizer calls it special.
        encode: Ids of a text.
        ids: Id of each added token by its text.
    """

    def __init__(
        self,
        texts: Iterable[tuple[str, bool]],
        *,
        encode: Callable[[str], list[int]],
        ids: Mapping[str, int],
    ) -> None:
        self._texts = tuple(
            text
            for text, is_special in texts
            if len(text) > 1 and (is_special or _MARKUP.fullmatch(text))
        )
        self._starts = tuple({text[0] for text in self._texts})
        cutting = [text for text in self._texts if _cuts(text, ids[text], encode)]
        # The longest first: a tokenizer takes the longest of those that begin at one place.
        ordered = sorted(cutting, key=len, reverse=True)
        self._cutting = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def shield(self, value: Any, *, keeps_reasoning: bool = False) -> Any:  # noqa: ANN401 - JSON
        """The value with a mark inside each control token of its texts, at any depth.

        `keeps_reasoning` leaves the marks of the model's reasoning as they are.
        """
        if isinstance(value, str):
            return self._shielded(value, keeps_reasoning=keeps_reasoning)
        if isinstance(value, Mapping):
            return {self.shield(name): self.shield(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.shield(each) for each in value]
        return value

    def kept(self, text: str) -> str:
        """The text with a mark inside each mark that it has, and its control tokens as they are."""
        return text.replace(_CUT, f"{_CUT[0]}{_CUT}{_CUT[1]}")

    def _shielded(self, text: str, *, keeps_reasoning: bool) -> str:
        if _CUT in text:
            text = self.kept(text)  # The client's own marks stay.
        for start in self._starts:  # Most texts have none: a loop is the cheapest way to see it.
            if start in text:
                break
        else:
            return text
        for token in self._texts:
            if keeps_reasoning and token in _REASONING:
                continue
            # Again, because an occurrence may overlap the one before it.
            while token in text:
                text = text.replace(token, f"{token[0]}{_CUT}{token[1:]}")
        return text

    def pieces(self, text: str) -> Sequence[str]:
        """Parts of a rendered text whose ids, one after the other, are the ids of the text.

        A part is either one control token or has none.
        """
        found: list[str] = []
        for part in text.split(_CUT) if _CUT in text else (text,):
            found += self._cut(part)
        return found

    def _cut(self, text: str) -> list[str]:
        if self._cutting is None:
            return [text] if text else []
        parts: list[str] = []
        start = 0
        for match in self._cutting.finditer(text):
            parts += (text[start : match.start()], match.group())
            start = match.end()
        parts.append(text[start:])
        return [part for part in parts if part]


def _cuts(token: str, token_id: int, encode: Callable[[str], list[int]]) -> bool:
    """Whether this tokenizer treats what is left and right of the token each on its own."""
    sides = (("word", "word"), ("word ", " word\n"), ("1", "\n\n1"))
    return all(
        encode(left + token + right) == [*encode(left), token_id, *encode(right)]
        for left, right in sides
    )
