"""The newest bodies of an episode: what a later one repeats byte for byte is not read again.

An agent sends its whole history with every request, 0.7 MB for 200,000 tokens, of which each turn
adds some hundred bytes at the end. JSON that begins with the same bytes has the same items up to
there. So the items behind them are read, and the messages of those before are taken over.
"""

from msgspec import Struct

from forgemq_gateway.core.held_bytes import HeldPart
from forgemq_gateway.core.requests import ProtocolName, ReadItems

KEPT_MAX = 4
"""An agent and the helpers that it starts send different histories with one key."""

# About what the Python objects of one message take beside its text.
_MESSAGE_BYTES = 256

KNOWN_ITEM = b'"forgemq: the items of an earlier body"'
"""Stands for the items that are not read again. An item is an object, and this is a text."""


class ReadBody(Struct, frozen=True, kw_only=True):
    """A body up to the end of its last item."""

    text: bytes
    items: ReadItems

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory: its text, and that of its messages."""
        return 2 * len(self.text) + _MESSAGE_BYTES * len(self.items.found.messages)

    def without_known(self, body: bytes) -> bytes:
        """A body that begins as this one, with one item in place of all that this one had."""
        return self.text[: self.items.start] + KNOWN_ITEM + body[len(self.text) :]


class ReadBodies:
    """The newest bodies of one episode.

    Example: after `note` of `{"messages":[a]}`, `begin_of` `{"messages":[a,b]}` is the earlier
    body, and its `without_known` is `{"messages":[KNOWN_ITEM,b]}`.

    Args:
        held: Counts the bytes of all of them.
    """

    def __init__(self, held: HeldPart) -> None:
        self._held = held
        self._kept: list[ReadBody] = []

    def begin_of(self, body: bytes, *, protocol: ProtocolName) -> ReadBody | None:
        """The longest earlier body of this protocol that this one begins with."""
        longest: ReadBody | None = None
        for each in self._kept:
            is_longer = longest is None or len(each.text) > len(longest.text)
            if is_longer and each.items.protocol == protocol and body.startswith(each.text):
                longest = each
        return longest

    def note(self, body: bytes, items: ReadItems) -> None:
        """Keep a body in place of the one that it goes on from, or of the oldest."""
        begin = self.begin_of(body, protocol=items.protocol)
        if begin is not None:
            self._drop(begin)
        elif len(self._kept) == KEPT_MAX:
            self._drop(self._kept[0])
        read = ReadBody(text=body[: len(body) - items.rest], items=items)
        self._kept.append(read)
        self._held.grow(read.size_bytes)

    def forget(self) -> None:
        """Drop all, because the episode has ended."""
        while self._kept:
            self._drop(self._kept[0])

    def _drop(self, read: ReadBody) -> None:
        self._kept.remove(read)
        self._held.grow(-read.size_bytes)
