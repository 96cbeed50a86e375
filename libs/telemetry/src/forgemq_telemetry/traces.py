"""W3C trace context as record headers and as HTTP headers.

A completion's trace id is its request id: both are 128 bits, so whoever knows the completion (the
trainer from a tree's sample ids, a person from the log) knows its trace without carrying it.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

Headers: TypeAlias = tuple[tuple[str, bytes], ...]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
_TRACEPARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class SpanPlace(NamedTuple):
    """One span in one trace: what a traceparent names."""

    trace_id: int
    span_id: int
    flags: int


def completion_trace(completion_id: str) -> Headers:
    """Parent of every span about this completion; 32 lower-case hexadecimal digits."""
    return ((TRACEPARENT, f"00-{completion_id}-{completion_id[:16]}-01".encode()),)


def trace_headers(headers: Headers) -> Headers:
    """Only the trace context of a record's headers, to be passed on."""
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


def span_place(headers: Headers) -> SpanPlace | None:
    """What the traceparent names; None where there is none or it is malformed or all zero."""
    for name, value in headers:
        if name == TRACEPARENT and (match := _TRACEPARENT.fullmatch(value)):
            place = SpanPlace(*(int(part, 16) for part in match.groups()))
            return place if place.trace_id and place.span_id else None
    return None


def traceparent(place: SpanPlace) -> Headers:
    """The header that names this span."""
    text = f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.flags:02x}"
    return ((TRACEPARENT, text.encode()),)
