"""What all readers, writers and members of one `KafkaLog` share."""

from dataclasses import dataclass

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka_connection import KafkaConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaRun:
    """A run on a cluster.

    Attributes:
        run: Id, the prefix of the run's names on the broker.
        blobs: For values above `inline_bytes_max`; None: such values are refused.
    """

    connection: KafkaConnection
    run: str
    blobs: BlobStore | None
    inline_bytes_max: int
