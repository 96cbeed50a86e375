"""Long pieces of text as tokens: each is tokenised once, and no Python code walks its tokens.

A renderer asks for the ids of a text and puts them between the markup of its template, id by id. In
its place a long piece is one negative id until the renderer has ended: its tokens then go in as
bytes. To tokenise is a pure function, so a piece that is known is exact.
"""

import sys
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate

_TOKEN_BYTES = 4
_DIGEST_BYTES = 16

# About 40 histories of 200,000 tokens; what the open groups of a run share is far less.
_HELD_BYTES_MAX = 32 * 1024 * 1024


class Pieces:
    """Tokens by text; the least recently used ones are dropped first. For any number of threads.

    Args:
        tokenise: Ids of a text.
        bytes_max: Limit of all tokens held.
    """

    def __init__(
        self, tokenise: Callable[[str], list[int]], *, bytes_max: int = _HELD_BYTES_MAX
    ) -> None:
        self._tokenise = tokenise
        self._bytes_max = bytes_max
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def of(self, text: str) -> bytes:
        """Tokens of the text as int32 bytes."""
        key = _digest(text)
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
        made = array("i", self._tokenise(text)).tobytes()
        with self._lock:
            self._hold(key, made)
        return made

    def _hold(self, key: bytes, made: bytes) -> None:
        if key in self._held or len(made) > self._bytes_max:
            return
        self._held[key] = made
        self.size_bytes += len(made)
        while self.size_bytes > self._bytes_max:
            _, evicted = self._held.popitem(last=False)
            self.size_bytes -= len(evicted)


class StandIns:
    """The negative ids of one rendering.

    Example: `put` of a piece of 3 tokens gives -1. `tokens([7, -1, 8])` has 5 tokens, and
    `position(2)`, the end of the second id, is 4.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._ids: dict[bytes, int] = {}

    def put(self, piece: bytes) -> int:
        """The id that stands for this piece; the same for the same piece."""
        known = self._ids.get(piece)
        if known is None:
            self._pieces.append(piece)
            known = self._ids[piece] = -len(self._pieces)
        return known

    def expand(self, ids: Sequence[int]) -> "Expanded":
        """The ids with every piece in its place."""
        return Expanded(ids, pieces=self._pieces)


class Expanded:
    """A rendering's tokens with its pieces in their places."""

    def __init__(self, ids: Sequence[int], *, pieces: Sequence[bytes]) -> None:
        self._places = [at for at, token in enumerate(ids) if token < 0] if pieces else []
        found = [pieces[-ids[at] - 1] for at in self._places]
        self._added = [0, *accumulate(len(piece) // _TOKEN_BYTES - 1 for piece in found)]
        parts: list[bytes] = []
        start = 0
        for at, piece in zip(self._places, found, strict=True):
            parts += (array("i", ids[start:at]).tobytes(), piece)
            start = at + 1
        parts.append(array("i", ids[start:]).tobytes())
        self.tokens = _little_endian(b"".join(parts))

    def position(self, index: int) -> int:
        """Number of tokens before the id at this index."""
        return index + self._added[bisect_left(self._places, index)]


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _little_endian(data: bytes) -> bytes:
    if sys.byteorder == "little":
        return data
    values = array("i", data)
    values.byteswap()
    return values.tobytes()
