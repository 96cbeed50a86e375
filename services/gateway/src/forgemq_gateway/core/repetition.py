"""What the headers of a request say about an earlier one with the same body.

A connection may be cut behind the gateway, by a proxy or a client's timeout, when the kernel has
taken the whole answer: the gateway cannot see that it did not arrive. Clients that send a request
again say so, each in its way. Without such a word the same body asks for another sample, as agents
do that want several.
"""

from collections.abc import Mapping

from msgspec import Struct

from forgemq_gateway.core.digests import digest_of

_RETRY_COUNT = "x-stainless-retry-count"
"""OpenAI's and Anthropic's clients: 0 for the first sending, then 1, 2, ..."""

_IDEMPOTENCY_KEY = "idempotency-key"
"""One key for all sendings of a request, and another one for the next request."""

_CODEX_TURN = "x-codex-turn-metadata"
"""codex names its turn in header and body, and sends a body twice in a turn only as a retry."""


class Repetition(Struct, frozen=True, kw_only=True):
    """How a request is to be compared with earlier ones.

    Attributes:
        is_retry: The client asks for the answer to its earlier request with the same digest.
        body_digest: Of the body, and of the idempotency key if there is one.
    """

    is_retry: bool
    body_digest: str


def repetition(headers: Mapping[str, str], *, body_digest: str) -> Repetition:
    """What a request with these headers, by name in lower case, and this body may repeat."""
    key = headers.get(_IDEMPOTENCY_KEY, "")
    count = headers.get(_RETRY_COUNT, "")
    is_resent = count.isascii() and count.isdecimal() and count.strip("0") != ""
    return Repetition(
        is_retry=bool(key) or is_resent or _CODEX_TURN in headers,
        body_digest=digest_of(f"{body_digest}\0{key}".encode()) if key else body_digest,
    )
