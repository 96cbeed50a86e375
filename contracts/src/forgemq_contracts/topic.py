"""What the registry says about a topic."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from forgemq_contracts.journal import JournalledBatch

PartitionedBy: TypeAlias = Literal["shared", "run", "queue", "group", "lane"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic and the one record type it carries.

    Attributes:
        name: On the broker, after the run's prefix.
        record: The struct every value decodes to.
        key: Field whose text is the record key.
        partitioned_by: What picks the partition; `queue` is the index of the queue in the run's
            configuration, `shared` and `run` have one partition.
        is_transactional: Whether it is written in transactions, always or never.
        producer: The only service that writes it.
        consumers: Services that read it; checked against what they declare.
        dead_letters_by: The one consumer that writes records which do not decode to `<name>-dlq`;
            the others skip them. "" for a topic without dead letters.
        needed_by: Consumer groups whose positions say from where their readers may read again.
            Records below the lowest of these positions are trimmed; if one group has no position
            yet, nothing is. () keeps everything as long as the run exists.
        newest_kept: Newest records of each partition that are never trimmed, for readers that
            look back from the end.
    """

    name: str
    record: type[msgspec.Struct]
    key: str
    partitioned_by: PartitionedBy
    is_transactional: bool
    producer: str
    consumers: tuple[str, ...]
    dead_letters_by: str = ""
    needed_by: tuple[str, ...] = ()
    newest_kept: int = 0

    @property
    def has_dlq(self) -> bool:
        """Whether records that do not decode go to a dead letter topic."""
        return bool(self.dead_letters_by)

    @property
    def dlq_name(self) -> str:
        """The dead letter topic: it has bad records with their original bytes."""
        return f"{self.name}-dlq"


def needed_group(service: str) -> str:
    """The consumer group whose positions say from where a service may read its inputs again."""
    return f"{service}-needed"


def journal_topic(service: str, partitioned_by: PartitionedBy) -> Topic:
    """The journal of a transform service, which it alone writes and reads."""
    return Topic(
        name=f"{service}-journal-v1",
        record=JournalledBatch,
        key="sequence",
        partitioned_by=partitioned_by,
        is_transactional=True,
        producer=service,
        consumers=(service,),
        needed_by=(f"{service}-positions",),
    )
