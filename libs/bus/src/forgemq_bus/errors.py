"""Errors between a service and the log.

LogError
 |- LogUnavailableError   the broker does not answer within the bounded retries
 |- AccessError           the broker or this process does not trust the other: settings are wrong
 |- FencedError           a newer writer or member took over; this process must stop
 |- RecordTooLargeError   a value above the limit, and the log has no blob store
 |- OutOfRangeError       a position below the first or above the end of its partition
 |- UnknownPlaceError     a topic or partition that does not exist
 |- PartitionCountError   a topic with another number of partitions than its run counts on
 |- BlobError             the blob store refuses or does not answer
 |  |- LostBlobError      a blob is missing, or its bytes are not those that were written;
 |                        a reader raises none, but returns the record as `lost`
 |- ClosedError           used after close
"""


class LogError(Exception):
    """A failure of the log; never caused by the content of a record."""


class LogUnavailableError(LogError):
    """The broker does not answer; the message names the address and how long it was tried."""


class AccessError(LogError):
    """User, password, certificate or protocol is refused; names the setting. No retry helps."""


class FencedError(LogError):
    """A newer owner exists; this process must stop writing."""


class RecordTooLargeError(LogError):
    """The value is above the limit, and the log has no blob store."""


class OutOfRangeError(LogError):
    """A position that the partition does not have; the message names both."""


class UnknownPlaceError(LogError):
    """The topic or the partition does not exist; call `create_topics` first."""


class PartitionCountError(LogError):
    """A topic has another number of partitions than its run counts on; no retry helps."""


class BlobError(LogError):
    """The blob store refused or did not answer; a retry may succeed."""


class LostBlobError(BlobError):
    """The blob is missing, or its bytes are not those that were written; no retry helps."""


class ClosedError(LogError):
    """A reader, writer or log was used after its `close`."""


FINAL_ERRORS = (AccessError, FencedError, ClosedError, PartitionCountError)
"""No later call can succeed, so the process must stop; any other error may be of one record."""

UNSENT_ERRORS = (BlobError, RecordTooLargeError)
"""Of a write: nothing was sent to the log. After any other error it may have the records."""
