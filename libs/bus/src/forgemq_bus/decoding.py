"""From a record as read to the struct it carries."""

import msgspec

from forgemq_bus.log import Record
from forgemq_contracts import topics


def decoded_record(record: Record) -> msgspec.Struct:
    """The struct of a record.

    Raises:
        msgspec.ValidationError: its bytes are not a record of its topic, or are lost; says why.
    """
    if record.lost:
        raise msgspec.ValidationError(record.lost)
    return topics.decode(topics.BY_NAME[record.topic], record.value)
