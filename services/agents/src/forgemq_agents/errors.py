"""Errors between an agent and the gateway, and of the agent itself."""


class GatewayError(Exception):
    """The gateway refused a request, or could not be reached in time.

    Attributes:
        status: HTTP status; 0 if no answer came.
        code: Reason for programs from the error body, "" if it has none.
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class EpisodeOverError(GatewayError):
    """404, 409 or 410: the episode has ended or was replaced, or its group is over or unknown."""


class ContextFullError(GatewayError):
    """The messages no longer fit into the model's context window."""


class TrainingEndedError(GatewayError):
    """Training has ended: the gateway takes no further training group."""


class AgentFailedError(Exception):
    """A black-box agent ended with an error; its episode is masked."""


class AgentTimeoutError(AgentFailedError):
    """A black-box agent ran out of time."""
