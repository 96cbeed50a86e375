"""What a protocol of agents is to the routes: how it writes requests, answers and refusals."""

from collections.abc import Sequence
from typing import Any, Protocol

from forgemq_gateway.core.conversation import Conversation
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.replies import Answer
from forgemq_gateway.core.requests import ProtocolName, ReadItems, Request


class WireStream(Protocol):
    """How one answer is written as a stream; it may count what it has written."""

    def keep_alive(self, *, request_id: str, created_s: int, model: str) -> bytes:
        """What the stream says while its answer is not there."""
        ...

    def more(self, answer: Answer) -> bytes:
        """What an unfinished answer has beyond what was written; its last part may grow."""
        ...

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """What is not written of the answer, one for each choice, to the end of the stream."""
        ...

    def fail(self, error: RefusedError) -> bytes:
        """A refusal as the end of the stream."""
        ...


class WireProtocol(Protocol):
    """How one protocol writes requests and answers."""

    @property
    def path(self) -> str:
        """Where requests are posted."""
        ...

    @property
    def name(self) -> ProtocolName:
        """How bodies are read: those of one name begin alike if their bytes do."""
        ...

    def read(
        self, body: bytes, conversation: Conversation, known: ReadItems | None = None, /
    ) -> Request:
        """The request in a body, or a RefusedError that names the field.

        `conversation` is what the episode has said so far, to which a body may refer; `known` is
        what KNOWN_ITEM in the body stands for (`core/read_bodies.py`).
        """
        ...

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer, one for each choice, as one JSON object."""
        ...

    def stream(self, request: Request) -> WireStream:
        """The stream that answers this request."""
        ...

    def error(self, error: RefusedError) -> dict[str, Any]:
        """A refusal as one JSON object."""
        ...


class TokenCounter(Protocol):
    """How one protocol asks for the number of a request's context tokens."""

    @property
    def path(self) -> str:
        """Where questions are posted."""
        ...

    @property
    def name(self) -> ProtocolName:
        """As `WireProtocol.name`."""
        ...

    def read(
        self, body: bytes, conversation: Conversation, known: ReadItems | None = None, /
    ) -> Request:
        """The request in a body; as `WireProtocol.read`."""
        ...

    def counted(self, tokens: int) -> dict[str, Any]:
        """The number as one JSON object."""
        ...

    def error(self, error: RefusedError) -> dict[str, Any]:
        """A refusal as one JSON object."""
        ...
