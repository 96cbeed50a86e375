"""Why an environment cannot be loaded or played."""


class UnplayableError(ValueError):
    """An environment cannot be loaded or played; the text says why."""


def chain(error: BaseException) -> str:
    """An error and its causes: the first one of verifiers often says nothing."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}".removesuffix(": "))
        cause = cause.__cause__
    return ", by ".join(texts)
