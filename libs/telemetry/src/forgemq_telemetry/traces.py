"""W3C trace context as record headers and as HTTP headers.

A completion's trace id is its request id; both have 128 bits. So a reader of any record that names
the completion knows its trace, and no record has to carry the id.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

Headers: TypeAlias = tuple[tuple[str, bytes], ...]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
_TRACEPARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class SpanIds(NamedTuple):
    """The ids of one span, as in a traceparent."""

    trace_id: int
    span_id: int
    flags: int


def completion_trace(completion_id: str) -> Headers:
    """Headers that make a span part of this completion's trace; the id is 32 hexadecimal digits."""
    return ((TRACEPARENT, f"00-{completion_id}-{completion_id[:16]}-01".encode()),)


def trace_headers(headers: Headers) -> Headers:
    """The trace context among a record's headers."""
    return tuple(header for header in headers if header[0] in (TRACEPARENT, TRACESTATE))


def headers_from_http(headers: Mapping[str, str]) -> Headers:
    """The trace context of a request; names are matched in lower case, as ASGI gives them."""
    return tuple(
        (name, headers[name].encode("latin-1"))
        for name in (TRACEPARENT, TRACESTATE)
        if name in headers
    )


def headers_to_http(headers: Headers) -> dict[str, str]:
    """The trace context as headers of an HTTP request."""
    return {name: value.decode("latin-1") for name, value in trace_headers(headers)}


def span_ids(headers: Headers) -> SpanIds | None:
    """The ids in the traceparent; None if it is missing, malformed or all zero."""
    for name, value in headers:
        if name == TRACEPARENT and (match := _TRACEPARENT.fullmatch(value)):
            ids = SpanIds(*(int(part, 16) for part in match.groups()))
            return ids if ids.trace_id and ids.span_id else None
    return None


def traceparent(ids: SpanIds) -> Headers:
    """The headers that name this span."""
    text = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.flags:02x}"
    return ((TRACEPARENT, text.encode()),)
