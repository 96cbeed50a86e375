"""Lines that libraries log become events of the service."""

import io
import json
import logging

from forgemq_shell.library_logs import library_logs
from forgemq_telemetry.telemetry import Telemetry


def logged_inside(*records: logging.LogRecord) -> list[dict[str, object]]:
    stream = io.StringIO()
    with library_logs(Telemetry(service="gateway", stream=stream, clock_ns=lambda: 5_000_000)):
        for record in records:
            logging.getLogger(record.name).handle(record)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def record(level: int, text: str, *arguments: object, error=None) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error else None
    return logging.LogRecord("a_library.cluster", level, "f", 1, text, arguments, exc_info)


def test_a_warning_of_a_library_is_one_event_with_its_logger_and_text():
    dead = record(logging.WARNING, "Marking the coordinator dead (node %s)", 1)
    assert logged_inside(dead) == [
        {
            "at_ms": 5,
            "service": "gateway",
            "event": "library_log",
            "level": "warning",
            "logger": "a_library.cluster",
            "text": "Marking the coordinator dead (node 1)",
        }
    ]


def test_an_error_is_an_event_with_its_cause_and_information_is_dropped():
    failed = record(logging.ERROR, "no answer", error=OSError("reset"))
    events = logged_inside(record(logging.INFO, "connected"), failed)
    assert [(each["level"], each["error"]) for each in events] == [("error", "OSError: reset")]


def test_of_lines_that_differ_in_their_values_alone_ten_a_minute_are_written():
    """A broker was away for 90 s, its client tried 200 times a second, and another call failed."""
    tries = []
    for number in range(90 * 200):
        tries.append(record(logging.ERROR, "Unable connect to node with id %s", number))
        tries[-1].created = 1_000.0 + number / 200
    other = record(logging.ERROR, "no answer")
    other.created = 1_030.0
    events = logged_inside(*tries[:6_000], other, *tries[6_000:])
    texts = [str(each["text"]).rpartition(" ")[2] for each in events]
    numbers = [str(number) for number in (*range(10), "answer", *range(12_000, 12_010))]
    assert texts == numbers
    assert [each["left_out"] for each in events if "left_out" in each] == [11_990]
    assert events[11]["left_out"] == 11_990


def test_a_clock_that_was_set_back_silences_nothing():
    lines = [record(logging.ERROR, "away") for _ in range(22)]
    for number, line in enumerate(lines):
        line.created = 5_000.0 if number < 11 else 1_000.0
    events = logged_inside(*lines)
    assert [each.get("left_out") for each in events] == [None] * 10 + [1] + [None] * 9


def test_nothing_becomes_an_event_once_the_service_has_ended():
    before = list(logging.getLogger().handlers)
    logged_inside()
    assert logging.getLogger().handlers == before
