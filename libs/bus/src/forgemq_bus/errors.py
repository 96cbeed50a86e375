"""What can go wrong between a service and the log.

LogError
 |- LogUnavailableError   the broker does not answer within the bounded retries
 |- AccessError           the broker or this process does not trust the other: settings are wrong
 |- FencedError           a newer writer or member took over; this process must stop
 |- RecordTooLargeError   a value over the topic's limit and no blob store to put it in
 |- OutOfRangeError       a position below the first or above the end of its partition
 |- UnknownPlaceError     a topic or partition that was never created
 |- BlobError             the blob store refuses or does not answer
 |  |- LostBlobError      a blob is gone, or its bytes are not those that were written
 |- ClosedError           used after close
"""


class LogError(Exception):
    """Any failure of the log itself, never of a record's content."""


class LogUnavailableError(LogError):
    """The broker does not answer; says which address and for how long it was tried."""


class AccessError(LogError):
    """User, password, certificate or protocol is refused; names the setting, and no retry helps."""


class FencedError(LogError):
    """A newer owner exists; the only right thing is to stop."""


class RecordTooLargeError(LogError):
    """The value is over the limit and there is no blob store."""


class OutOfRangeError(LogError):
    """A position that the partition does not have; says which place and position."""


class UnknownPlaceError(LogError):
    """The topic or the partition does not exist; `create_topics` comes first."""


class BlobError(LogError):
    """The blob store did not do what it was asked; another time it may."""


class LostBlobError(BlobError):
    """The blob store has no such blob, or other bytes than were written: no retry brings it."""


class ClosedError(LogError):
    """A reader, writer or log was used after its `close`."""
