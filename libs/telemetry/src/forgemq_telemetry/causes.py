"""What went wrong below a task group, for an event or a line at a terminal."""


def causes(error: BaseException) -> list[BaseException]:
    """The errors inside nested exception groups, in their order; any other error is its own.

    Example: `ExceptionGroup("", [ValueError("a"), ExceptionGroup("", [OSError("b")])])` gives the
    ValueError and the OSError.
    """
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in causes(inner)]
    return [error]
