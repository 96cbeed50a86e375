"""A dead letter: what is known of a record that does not decode."""

from msgspec import Struct


class DeadLetter(Struct, frozen=True, kw_only=True):
    """A bad record stands in its dead letter topic; the scheduler lets its group fail.

    On the wire it is the bad record's own key and bytes, and headers with these names.

    Attributes:
        topic: Where the bad record stood, with its partition and offset.
        reason: Why it is none.
        group: Id of the group it is about; "" where neither headers, key nor bytes tell one.
    """

    topic: str
    partition: int
    offset: int
    reason: str
    group: str = ""
