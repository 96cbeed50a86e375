"""Turns warnings and errors that libraries log into events of the service.

The broker client and the HTTP server log lines of text through `logging`. A service writes one JSON
object a line, so their warnings and errors become events; lower levels are dropped, and so is most
of what comes again and again: a client whose broker is away logs nearly 200 lines a second.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forgemq_telemetry.telemetry import Telemetry

ALIKE_MAX = 10
"""Lines of one form that are written within `ALIKE_SPAN_S`."""
ALIKE_SPAN_S = 60.0
FORMS_MAX = 1000
"""A library that logs finished texts has a form for each; beyond these the oldest is forgotten."""


@contextmanager
def library_logs(telemetry: Telemetry) -> Iterator[None]:
    """While the context is open, warnings and errors of libraries are `library_log` events.

    Of lines of one form, which differ in their values at most, ten a minute are written; the next
    one that is says in `left_out` how many were not.
    """
    forms: dict[tuple[str, str], _Form] = {}

    def write_event(record: logging.LogRecord) -> bool:
        left_out = _left_out_before(record, forms)
        if left_out is None:
            return False
        failure = record.exc_info[1] if record.exc_info else None
        telemetry.event(
            "library_log",
            level=record.levelname.lower(),
            logger=record.name,
            text=record.getMessage(),
            **({"error": f"{type(failure).__name__}: {failure}"} if failure else {}),
            **({"left_out": left_out} if left_out else {}),
        )
        return False  # The handler must not write the record a second time.

    handler = logging.Handler(level=logging.WARNING)
    handler.addFilter(write_event)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


@dataclass(slots=True)
class _Form:
    """Lines of one form since `since_s`: how many were written, and how many left out."""

    since_s: float
    written: int = 0
    left_out: int = 0


def _left_out_before(record: logging.LogRecord, forms: dict[tuple[str, str], _Form]) -> int | None:
    """How many lines like this one were left out since one was written; None: this one is, too."""
    name = (record.name, str(record.msg))
    form = forms.setdefault(name, _Form(since_s=record.created))
    if len(forms) > FORMS_MAX:
        del forms[next(iter(forms))]
    # A clock that was set back begins a new span as well.
    if not 0 <= record.created - form.since_s < ALIKE_SPAN_S:
        form.since_s, form.written = record.created, 0
    if form.written >= ALIKE_MAX:
        form.left_out += 1
        return None
    form.written += 1
    left_out, form.left_out = form.left_out, 0
    return left_out
