"""The array of messages in a body: all of it, or what an earlier body of the episode has not.

A body that begins as an earlier one is read with KNOWN_ITEM in place of the items that both have
(`core/read_bodies.py`). What comes out is the same; a refusal may name another place, so the route
reads the whole body if a shortened one is refused.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.read_bodies import KNOWN_ITEM
from forgemq_gateway.core.requests import (
    MESSAGES_MAX,
    KeyedMessages,
    ProtocolName,
    ReadItems,
    RequestMessage,
)
from forgemq_gateway.protocols.json_body import (
    LongFields,
    ReadAgain,
    item_at,
    items_in,
    raw_items,
)

Item = TypeVar("Item")

_LONG = msgspec.json.Decoder(LongFields)
_KNOWN = Raw(KNOWN_ITEM)


class MessageItems(Struct, frozen=True, kw_only=True):
    """The array of messages in one body.

    Attributes:
        body: As it is read, maybe shortened.
        array: Of the body.
        field: Its name.
        known: What KNOWN_ITEM at the start of the array stands for; None in a whole body.
    """

    protocol: ProtocolName
    body: bytes
    array: Raw
    field: str
    known: ReadItems | None

    def some(
        self, decoder: "msgspec.json.Decoder[Item]", *, again: ReadAgain[Item] | None = None
    ) -> list[tuple[str, Item]]:
        """As `added`, of an array that has at least one item."""
        given = list(self.added(decoder, again=again))
        if not given and self.known is None:
            raise invalid(f"{self.field} must have at least one item", param=self.field)
        return given

    def added(
        self, decoder: "msgspec.json.Decoder[Item]", *, again: ReadAgain[Item] | None = None
    ) -> Iterator[tuple[str, Item]]:
        """The items that are not known, as `items_in`.

        Raises:
            RefusedError: 400: as `items_in`, or the known ones are not at the start of the array.
        """
        if self.known is None:
            yield from items_in(self.array, decoder, where=self.field, again=again)
            return
        items = raw_items(self.array, where=self.field)
        if next(items, None) != _KNOWN:
            raise invalid(f"{self.field} must be there once", param=self.field)
        for index, item in enumerate(items, start=self.known.count):
            if index >= MESSAGES_MAX:
                raise invalid(f"over {MESSAGES_MAX} items", param=self.field)
            place = f"{self.field}[{index}]"
            yield place, item_at(item, decoder, where=place, again=again)

    def read(self, messages: Iterable[RequestMessage]) -> KeyedMessages:
        """The known messages, then those of the added items."""
        before = KeyedMessages() if self.known is None else self.known.found
        return before + KeyedMessages.of(messages)

    def place(self, found: KeyedMessages, *, added: int) -> ReadItems | None:
        """Where the items are, for a later body; None if that is not sure.

        Args:
            found: The messages in all items.
            added: Number of items that were not known.
        """
        start = self._start() if self.known is None else self.known.start
        if start is None:
            return None
        return ReadItems(
            protocol=self.protocol,
            start=start,
            # The closing bracket is part of the rest.
            rest=len(self.body) - (start - 1) - (len(memoryview(self.array)) - 1),
            count=added if self.known is None else self.known.count + added,
            found=found,
        )

    def _start(self) -> int | None:
        """Where the first item begins; None if that is not sure.

        The same bytes may also be elsewhere in the body. They are this array if the field has
        another value once they are replaced.
        """
        array = bytes(self.array)
        start = self.body.find(array) + 1
        replaced = self.body[:start] + KNOWN_ITEM + self.body[start + len(array) - 2 :]
        try:
            long = _LONG.decode(replaced)
        except msgspec.DecodeError:
            return None
        value = bytes(getattr(long, self.field))
        return start if value == b"[%b]" % KNOWN_ITEM else None
