"""Turns warnings and errors that libraries log into events of the service.

The broker client and the HTTP server log lines of text through `logging`. A service writes one JSON
object a line, so their warnings and errors become events; lower levels are dropped.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from forgemq_telemetry.telemetry import Telemetry


@contextmanager
def library_logs(telemetry: Telemetry) -> Iterator[None]:
    """While the context is open, warnings and errors of libraries are `library_log` events."""

    def write_event(record: logging.LogRecord) -> bool:
        failure = record.exc_info[1] if record.exc_info else None
        telemetry.event(
            "library_log",
            level=record.levelname.lower(),
            logger=record.name,
            text=record.getMessage(),
            **({"error": f"{type(failure).__name__}: {failure}"} if failure else {}),
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
