"""The errors inside the groups that task groups wrap them in."""


def causes_of(error: BaseException) -> list[BaseException]:
    """The errors at the leaves of nested exception groups, in order; [error] if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in causes_of(inner)]
    return [error]
