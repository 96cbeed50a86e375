"""From structs to log records: the key, the wire bytes and the trace context."""

from forgemq.bus.log import Emit, Headers
from forgemq.contracts import topics
from forgemq.contracts.messages import Output


def emit_of(output: Output, *, headers: Headers = ()) -> Emit:
    """The log record of an output; its key is the text of the field that the registry names."""
    key = str(getattr(output.record, topics.BY_NAME[output.topic].key))
    return Emit(
        topic=output.topic,
        partition=output.partition,
        key=key.encode(),
        value=topics.encode(output.record),
        headers=headers,
    )
