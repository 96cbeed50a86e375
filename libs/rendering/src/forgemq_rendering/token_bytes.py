"""The bytes that a token stands for, also where they are only a part of a character."""

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"

# What GPT-2 writes as itself in the pieces of a byte-level vocabulary; each other byte is a
# character from 256 on, in order.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))


def _byte_of_character() -> dict[str, int]:
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    alphabet = {chr(byte): byte for byte in _PRINTABLE}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    """Finds the bytes of tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, *, is_bytewise: bool) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_of_character() if is_bytewise else {}
        self._added = frozenset(tokenizer.get_added_tokens_decoder())

    def of(self, token_id: int, *, text: str) -> bytes | None:
        """The bytes of a token whose text is known.

        None if the text has a part of a character in it, and the vocabulary does not say which.
        """
        if _REPLACEMENT not in text or token_id in self._added:
            return text.encode("utf-8", "replace")
        piece = self._tokenizer.id_to_token(token_id) or ""
        if not piece or any(character not in self._bytes for character in piece):
            return None
        return bytes(self._bytes[character] for character in piece)
