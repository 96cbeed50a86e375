"""What a protocol of agents is to the routes: how it writes requests, answers and refusals."""

from typing import Any, Protocol

from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.replies import Answer
from forgemq_gateway.core.requests import Request


class WireProtocol(Protocol):
    """How one protocol writes requests and answers."""

    @property
    def path(self) -> str:
        """Where requests are posted."""
        ...

    def read(self, body: bytes) -> Request:
        """The request in a body, or a RefusedError that names the field."""
        ...

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one JSON object."""
        ...

    def stream(self, answer: Answer, *, includes_usage: bool) -> bytes:
        """The answer as the events of a stream, to its end."""
        ...

    def keep_alive(self, *, request_id: str, created_s: int, model: str) -> bytes:
        """What a stream writes while its answer is not there."""
        ...

    def error(self, error: RefusedError) -> dict[str, Any]:
        """A refusal as one JSON object."""
        ...

    def stream_error(self, error: RefusedError) -> bytes:
        """A refusal as the last event of a stream."""
        ...


class TokenCounter(Protocol):
    """How one protocol asks for the number of a request's context tokens."""

    @property
    def path(self) -> str:
        """Where questions are posted."""
        ...

    def read(self, body: bytes) -> Request:
        """The request in a body, or a RefusedError that names the field."""
        ...

    def counted(self, tokens: int) -> dict[str, Any]:
        """The number as one JSON object."""
        ...

    def error(self, error: RefusedError) -> dict[str, Any]:
        """A refusal as one JSON object."""
        ...
