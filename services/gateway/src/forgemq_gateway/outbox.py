"""Writes the gateway's records; the topic registry names the topic of each."""

from msgspec import Struct

from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_bus.log import Headers, Record, Writer
from forgemq_contracts import topics
from forgemq_contracts.completions import (
    CancelledCompletion,
    DeliveredCompletion,
    RequestedCompletion,
)
from forgemq_contracts.episodes import FinishedEpisode, OpenedEpisode
from forgemq_contracts.groups import RequestedGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import RunConfiguration
from forgemq_gateway.ownership import StandingClaim
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.records import emit_of

PRODUCES = (
    topics.REQUESTED_GROUPS,
    topics.OWNED_RUNS,  # in transactions: ownership.py
    topics.OPENED_EPISODES,
    topics.REQUESTED_COMPLETIONS,
    topics.CANCELLED_COMPLETIONS,
    topics.DELIVERED_COMPLETIONS,
    topics.FINISHED_EPISODES,
)
_TOPIC_OF = {topic.record: topic for topic in PRODUCES}


class Outbox:
    """Where all records of the gateway are written."""

    def __init__(
        self,
        writer: Writer,
        *,
        configuration: RunConfiguration,
        dead_letters: DeadLetters,
        claim: StandingClaim,
    ) -> None:
        self.claim = claim
        self._writer = writer
        self._dead_letters = dead_letters
        self._group_partitions = configuration.log.group_partitions
        self._queues = {queue.domain: number for number, queue in enumerate(configuration.queues)}

    async def write(self, record: Struct, *, headers: Headers = ()) -> None:
        """Write a record to its partition; returns when it is durable."""
        topic = _TOPIC_OF[type(record)]
        output = Output(topic=topic.name, partition=self._partition(record), record=record)
        await self._writer.write(emit_of(output, headers=headers))

    async def try_write(self, record: Struct, *, headers: Headers = ()) -> LogError | None:
        """Write a record that one request needs; returns why it may not be on the log.

        Raises:
            LogError: one of `FINAL_ERRORS`.
        """
        try:
            await self.write(record, headers=headers)
        except FINAL_ERRORS:
            raise
        except LogError as error:
            return error
        return None

    async def write_dead_letter(self, record: Record, *, reason: str) -> bool:
        """Write a dead letter for a record that does not decode; False if another service does."""
        return await self._dead_letters.write(record, reason)

    def _partition(self, record: Struct) -> int:
        match record:
            case RequestedGroup():
                return self._queues[record.domain]
            case RequestedCompletion() | CancelledCompletion():
                return record.lane
            case OpenedEpisode() | FinishedEpisode() | DeliveredCompletion():
                return group_partition(record.group_id, partitions=self._group_partitions)
        raise TypeError(f"the gateway writes no {type(record).__name__}")
