"""Makes log records from structs: key, wire bytes, and the header that names the group."""

import msgspec

from forgemq_bus.log import Emit, Headers, Record
from forgemq_contracts import topics
from forgemq_contracts.messages import Output

GROUP_HEADER = "group"
"""Names the group of a record whose key is another id, so that the group can fail if the record
does not decode."""


def emit_of(output: Output, *, headers: Headers = ()) -> Emit:
    """The log record of an output; its key is the text of the field that the registry names.

    A record about a group gets the header `group` behind `headers`, unless the group is its key.
    """
    field = topics.BY_NAME[output.topic].key
    key = str(getattr(output.record, field))
    return Emit(
        topic=output.topic,
        partition=output.partition,
        key=key.encode(),
        value=topics.encode(output.record),
        headers=headers if field == "group_id" else (*headers, *_group(output.record)),
    )


def group_in_header(record: Record) -> str | None:
    """The group that a record's header names, without decoding it; None if it names none."""
    name = dict(record.headers).get(GROUP_HEADER)
    return None if name is None else name.decode(errors="replace")


def _group(record: msgspec.Struct) -> Headers:
    fields = record.__struct_fields__
    group = getattr(record, "group_id") if "group_id" in fields else None  # noqa: B009 - any struct
    return () if group is None else ((GROUP_HEADER, str(group).encode()),)
