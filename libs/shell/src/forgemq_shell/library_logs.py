"""What libraries log, as events like the service's own.

Clients of the broker and servers of HTTP log lines of text through `logging`. A service's log is
one JSON object a line, so warnings and errors of theirs become events; the rest is left out.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from forgemq_telemetry.telemetry import Telemetry


@contextmanager
def library_logs(telemetry: Telemetry) -> Iterator[None]:
    """While inside, warnings and errors of libraries are `library_log` events."""

    def tell(record: logging.LogRecord) -> bool:
        failure = record.exc_info[1] if record.exc_info else None
        telemetry.event(
            "library_log",
            level=record.levelname.lower(),
            logger=record.name,
            text=record.getMessage(),
            **({"error": f"{type(failure).__name__}: {failure}"} if failure else {}),
        )
        return False  # told: the handler itself has nothing to write

    handler = logging.Handler(level=logging.WARNING)
    handler.addFilter(tell)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
