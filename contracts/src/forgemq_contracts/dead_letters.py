"""A dead letter: what is known about a record that does not decode."""

from msgspec import Struct


class DeadLetter(Struct, frozen=True, kw_only=True):
    """A bad record was written to its dead letter topic; the scheduler fails its group.

    On the wire it is the bad record's key and bytes, and headers with the names of these fields.

    Attributes:
        topic: Topic of the bad record; partition and offset are on it.
        reason: Why it does not decode.
        group: Id of the group it is about; "" if neither headers, key nor bytes name one.
    """

    topic: str
    partition: int
    offset: int
    reason: str
    group: str = ""
