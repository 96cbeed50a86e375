"""What can go wrong between a service and the log.

LogError
 |- LogUnavailableError   the broker does not answer within the bounded retries
 |- FencedError           a newer writer or member took over; this process must stop
 |- RecordTooLargeError   a value over the topic's limit and no blob store to put it in
"""


class LogError(Exception):
    """Any failure of the log itself, never of a record's content."""


class LogUnavailableError(LogError):
    """The broker does not answer; says which address and for how long it was tried."""


class FencedError(LogError):
    """A newer owner exists; the only right thing is to stop."""


class RecordTooLargeError(LogError):
    """The value is over the limit and there is no blob store."""
