"""Errors between an agent and the gateway, and of the agent itself."""


class TaskFileError(ValueError):
    """A file of tasks cannot be used; the text names it and why."""


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


class KeysFullError(GatewayError):
    """The run remembers as many idempotency keys as it can, and this one is new."""


class TrainingEndedError(GatewayError):
    """Training has ended: the gateway takes no further training group."""


class PolicyFailedError(Exception):
    """The agent cannot go on because of what the policy wrote; the episode is scored.

    Raise it out of `play`. The episode ends as completed, truncated by `declared` if no limit was
    named, with the error as its detail. Any other exception masks it.
    """


class AgentFailedError(Exception):
    """A black-box agent ended with an error; its episode is masked."""


class AgentStatusError(AgentFailedError):
    """A black-box agent ended with another exit status than 0.

    Attributes:
        status: As it ended; minus the number of a signal.
        output: The end of what it printed.
    """

    def __init__(self, *, status: int, output: bytes) -> None:
        super().__init__(f"status {status}: {output.decode(errors='replace')}")
        self.status = status
        self.output = output


class AgentTimeoutError(AgentFailedError):
    """A black-box agent ran out of time."""
