"""Refusals in the terms that every protocol has: a status, a type, and the field that is wrong."""

import re
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from msgspec import Struct

from forgemq_contracts.admin import ErrorType

CONTEXT_FULL_CODE = "context_length_exceeded"
"""What OpenAI's clients and the agents built on them look for."""

CONSTRAINT_CODE = "unsupported_constraint"
"""Of a 400: the demanded form of the reply cannot be enforced."""


Limit: TypeAlias = Literal[
    "", "body_bytes", "key_requests", "key_rate", "requests", "path_messages", "episode_paths"
]
"""A limit of the settings that refused a request, as metrics name it; "" if none did."""


class Overflow(Struct, frozen=True, kw_only=True):
    """Messages that do not fit: their tokens, exactly or at least, and the limit."""

    tokens: int
    tokens_max: int


class RefusedError(Exception):
    """A request that is refused; it has changed nothing.

    Attributes:
        status: HTTP status.
        kind: Type in the error body.
        param: Path of the field that is wrong (`messages[3].role`), if one is.
        code: Reason for programs, if there is one.
        retry_after_s: The client may ask again after this many seconds, if at all.
        limit: The limit of the settings that refused it, if one did.
        overflow: By how much the messages do not fit, if that is the reason and known.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: ErrorType,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        overflow: Overflow | None = None,
        limit: Limit = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.overflow = overflow
        self.limit = limit

    @property
    def is_context_full(self) -> bool:
        """Whether the messages do not fit into the context window."""
        return self.code == CONTEXT_FULL_CODE


def invalid(message: str, *, param: str | None, code: str | None = None) -> RefusedError:
    """400: the request cannot be served as it is."""
    return RefusedError(message, status=400, kind="invalid_request_error", param=param, code=code)


def context_overflow(*, context_tokens: int, context_tokens_max: int) -> RefusedError:
    """400 in the words that agents search for before they shorten their history."""
    return _overflow("resulted in", context_tokens, context_tokens_max)


def surely_overflows(*, tokens_min: int, context_tokens_max: int) -> RefusedError:
    """400 as `context_overflow`, for messages that nobody has tokenised."""
    return _overflow("have at least", tokens_min, context_tokens_max)


def _overflow(verb: str, tokens: int, tokens_max: int) -> RefusedError:
    return RefusedError(
        f"This model's maximum context length is {tokens_max} tokens. However, your messages "
        f"{verb} {tokens} tokens. Please reduce the length of the messages.",
        status=400,
        kind="invalid_request_error",
        param="messages",
        code=CONTEXT_FULL_CODE,
        overflow=Overflow(tokens=tokens, tokens_max=tokens_max),
    )


def engine_overflow(error: str) -> RefusedError:
    """400 as `context_overflow`, for a context that only the engine finds too long."""
    return invalid(
        f"This model's maximum context length is exceeded: {error}. Please reduce the length of "
        "the messages.",
        param="messages",
        code=CONTEXT_FULL_CODE,
    )


def engine_constraint(error: str) -> RefusedError:
    """400: the engine cannot compile the form that the client demands of the reply."""
    return invalid(
        "the form of the reply (response_format, tool_choice with the tools' parameters, or a "
        f"grammar) cannot be enforced: {error}",
        param=None,
        code=CONSTRAINT_CODE,
    )


class MovedError(RefusedError):
    """Another gateway owns the group now: it can answer, and continues what was begun here.

    Attributes:
        group_id: The group that moved.
        body: Of the request, if it was read.
        has_opened: Whether the client has had the head of a stream.
        refuse: How to refuse the request then, if not by an answer with a status.
    """

    def __init__(self, group_id: str) -> None:
        super().__init__(
            f"group {group_id} has moved to another gateway: ask again",
            status=503,
            kind="server_error",
            retry_after_s=1,
        )
        self.group_id = group_id
        self.body: bytes | None = None
        self.has_opened = False
        self.refuse: Callable[[RefusedError], Awaitable[None]] | None = None


def busy(
    message: str, *, retry_after_s: int = 1, status: int = 429, limit: Limit = ""
) -> RefusedError:
    """429 or 503: the same request may succeed later."""
    kind: ErrorType = "rate_limit_error" if status == 429 else "server_error"
    return RefusedError(message, status=status, kind=kind, retry_after_s=retry_after_s, limit=limit)


def log_refuses(error: Exception) -> RefusedError:
    """503: a record that this request needs is not on the log; names the kind of its error."""
    # Not its text: that has addresses, of which clients are to know none.
    kind = type(error).__name__
    return busy(f"the log takes no record at the moment: {kind}", status=503, retry_after_s=5)


def ending() -> RefusedError:
    """503: this gateway answers no more; another one does, or the next process at its address."""
    return busy("this gateway ends: ask again", status=503)


def unknown(message: str) -> RefusedError:
    """404: it does not exist."""
    return RefusedError(message, status=404, kind="not_found_error")


def unauthorized(message: str) -> RefusedError:
    """401: the key is missing or wrong."""
    return RefusedError(message, status=401, kind="authentication_error", code="invalid_api_key")


def conflict(message: str, *, param: str | None = None) -> RefusedError:
    """409: what is there already does not agree, as an episode that has ended or was replaced."""
    return RefusedError(message, status=409, kind="conflict_error", param=param)


def gone(message: str) -> RefusedError:
    """410: the group or the training is over."""
    return RefusedError(message, status=410, kind="gone_error")


def failed(message: str, *, status: int = 503) -> RefusedError:
    """5xx: this request has no answer, and it is not the client's fault."""
    return RefusedError(message, status=status, kind="server_error")


def sampled_otherwise() -> RefusedError:
    """503: the client has the beginning of an answer that another attempt sampled otherwise."""
    return failed(
        "the engine died and the answer was sampled again with other tokens: what was streamed of "
        "it is void; the same request gets the new answer"
    )


_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")


def field_of(error: Exception) -> str | None:
    """Path of the field that a msgspec decoder complains about; None for the body as a whole.

    The decoder's message ends with ` - at `$.messages[3].role``, or says which field is missing.
    """
    explained, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    missing = _MISSING_FIELD.search(explained)
    if missing is None:
        return param
    return f"{param}.{missing[1]}" if param else missing[1]
