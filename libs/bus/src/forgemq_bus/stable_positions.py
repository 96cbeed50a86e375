"""The OffsetFetch request that waits for transactions in their last phase (KIP-447).

aiokafka 0.14 supports it up to version 3, which returns the position before a commit whose marker
is not written yet: a task that restarts at once would handle its last batch twice.
"""

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

UNSTABLE_OFFSET_COMMIT = 88  # Kafka's error code for a position in an open transaction.


class StablePositionsResponse(Response):  # type: ignore[misc] # aiokafka has no types here.
    """OffsetFetch response, version 7."""

    API_KEY = 9
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString("utf-8")),
                        ("error_code", Int16),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("error_code", Int16),
        ("tags", TaggedFields),
    )


class StablePositionsRequestStruct(RequestStruct):  # type: ignore[misc] # As above.
    """OffsetFetch request, version 7."""

    API_KEY = 9
    API_VERSION = 7
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = StablePositionsResponse
    SCHEMA = Schema(
        ("group", CompactString("utf-8")),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                ("partitions", CompactArray(Int32)),
                ("tags", TaggedFields),
            ),
        ),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    )


class StablePositionsRequest(Request[StablePositionsRequestStruct]):  # type: ignore[misc] # As above.
    """Asks for committed positions of a group; an unstable one is an error to retry."""

    API_KEY = 9

    def __init__(self, group: str, topics: dict[str, list[int]]) -> None:
        """Ask for these partitions of topics, all by their names on the broker."""
        self._group = group
        self._topics: list[tuple[str, list[int], dict[int, bytes]]] = [
            (topic, numbers, {}) for topic, numbers in topics.items()
        ]

    def build(
        self, request_struct_class: type[StablePositionsRequestStruct]
    ) -> StablePositionsRequestStruct:
        """The request in its wire format."""
        return request_struct_class(self._group, self._topics, True, {})
