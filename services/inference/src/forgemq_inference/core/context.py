"""Token ids of a context in the two forms that a lane needs: as they travel, and as JSON.

A context of 200,000 tokens returns every turn with a few hundred tokens appended. Writing all of it
as JSON each time would cost more than everything else a lane does, so the text is kept and grows.
"""

from typing import NamedTuple

import msgspec

from forgemq_contracts.arrays import unpack_ids

TOKEN_BYTES = 4
"""int32."""


class TokenContext(NamedTuple):
    """Leading token ids of a request or a completion.

    Attributes:
        tokens: int32 bytes.
        text: The same ids as JSON numbers with commas between them, without brackets.

    Example: ids 7 and 12 are 8 bytes of tokens and the text `7,12`.
    """

    tokens: bytes = b""
    text: bytes = b""

    @property
    def tokens_count(self) -> int:
        """Number of ids."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def size_bytes(self) -> int:
        """Memory of both forms."""
        return len(self.tokens) + len(self.text)

    def extended(self, tokens: bytes) -> "TokenContext":
        """This context with ids appended; costs their conversion and one copy."""
        text = msgspec.json.encode(unpack_ids(tokens))[1:-1]
        separator = b"," if self.text and text else b""
        return TokenContext(self.tokens + tokens, self.text + separator + text)

    def first(self, tokens_count: int) -> "TokenContext":
        """The first ids; costs nothing if these are all."""
        if tokens_count == self.tokens_count:
            return self
        return TokenContext().extended(self.tokens[: tokens_count * TOKEN_BYTES])
