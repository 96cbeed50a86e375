"""How a reward function says that it waits for others, for which it is not to be blamed.

The process that runs it listens (`heard_by`), and counts the time of no wait for the limit of its
grading, `rewards.grader_timeout_s`. Nobody listens elsewhere, as in a test of the function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

Listener: TypeAlias = Callable[[bool], None]
"""Hears whether the function waits, each time that this changes."""

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """In this context, and in tasks that are created in it, waits are heard by this listener.

    Of waits of several tasks at once it hears where the first begins and the last ends.
    """
    waits = 0

    def count(is_waiting: bool) -> None:
        nonlocal waits
        was_waiting = waits > 0
        waits += 1 if is_waiting else -1
        if was_waiting != (waits > 0):
            listener(is_waiting)

    token = _LISTENER.set(count)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def waiting() -> Iterator[None]:
    """What is awaited in this context is the end of another grading's work."""
    listener = _LISTENER.get()
    if listener is None:
        yield
        return
    listener(True)
    try:
        yield
    finally:
        listener(False)
