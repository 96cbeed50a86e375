"""What can go wrong between an agent and the gateway."""


class GatewayError(Exception):
    """The gateway refused a request, or could not be reached in time.

    Attributes:
        status: HTTP status; 0 where no answer came.
        code: Machine-readable reason from the error body, "" where it names none.
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class EpisodeOverError(GatewayError):
    """The episode is no longer ours: replaced by a later attempt, or its group is over."""


class ContextFullError(GatewayError):
    """The messages no longer fit into the model's context window."""


class TrainingEndedError(GatewayError):
    """No more training groups are taken."""


class AgentFailedError(Exception):
    """A black-box agent ended with an error or ran out of time; its episode is masked."""
