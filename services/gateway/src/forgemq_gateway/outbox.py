"""Writes the gateway's records; the topic registry names the topic of each."""

from typing import TypeAlias

from msgspec import Struct

from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_bus.log import Headers, Place, Record, Writer
from forgemq_contracts import topics
from forgemq_contracts.completions import (
    CancelledCompletion,
    DeliveredCompletion,
    RequestedCompletion,
)
from forgemq_contracts.episodes import FinishedEpisode, OpenedEpisode
from forgemq_contracts.groups import RequestedGroup
from forgemq_contracts.lane_plan import RequestedLane
from forgemq_contracts.messages import Output
from forgemq_contracts.ownership import ReportedGateway
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import RunConfiguration
from forgemq_gateway.fenced_writer import FencedWriter
from forgemq_gateway.ownership import ReadBack
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
    topics.REPORTED_GATEWAYS,
    topics.REQUESTED_LANES,
)
_TOPIC_OF = {topic.record: topic for topic in PRODUCES}

Promise: TypeAlias = RequestedGroup | OpenedEpisode | FinishedEpisode
"""Records that an answer with 200 stands for."""


class Outbox:
    """Where all records of the gateway are written."""

    def __init__(
        self,
        writer: Writer,
        *,
        configuration: RunConfiguration,
        dead_letters: DeadLetters,
        fenced: FencedWriter,
        read_back: ReadBack,
    ) -> None:
        self._read_back = read_back
        self._writer = writer
        self._fenced = fenced
        self._dead_letters = dead_letters
        self._group_partitions = configuration.log.group_partitions
        self._queues = {queue.domain: number for number, queue in enumerate(configuration.queues)}

    async def write(self, record: Struct, *, headers: Headers = ()) -> None:
        """Write a record to its partition; returns when it is durable."""
        topic = _TOPIC_OF[type(record)]
        output = Output(topic=topic.name, partition=self._partition(record), record=record)
        await self._writer.write(emit_of(output, headers=headers))

    async def promise(self, record: Promise, *, tenure: int) -> None:
        """Write what an answer with 200 stands for; the next owner of the group knows it too.

        Args:
            record: Of a group that this gateway serves.
            tenure: Of this gateway over the group, from before anything of the record was decided.

        Raises:
            MovedError: another gateway owns the group; nothing is written.
            LogUnavailableError: no answer in time; the record may be on the log.
        """
        topic = _TOPIC_OF[type(record)]
        output = Output(topic=topic.name, partition=self._partition(record), record=record)
        await self._fenced.write(emit_of(output), group_id=record.group_id, tenure=tenure)

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

    async def read_deliveries(self, group_id: str) -> None:
        """Return when all deliveries of a group are known, also those of its previous owner.

        Raises:
            LogUnavailableError: this gateway reads the log too late.
        """
        number = group_partition(group_id, partitions=self._group_partitions)
        await self._read_back.until_now([Place(topics.DELIVERED_COMPLETIONS.name, number)])

    def forget_letters(self) -> None:
        """Read again which dead letters there are, because another gateway has written them."""
        self._dead_letters.forget()

    async def write_dead_letter(self, record: Record, *, reason: str) -> None:
        """Write a dead letter for a record that does not decode, unless another service does."""
        await self._dead_letters.write(record, reason)

    def _partition(self, record: Struct) -> int:
        match record:
            case RequestedGroup():
                return self._queues[record.domain]
            case ReportedGateway() | RequestedLane():
                return 0
            case RequestedCompletion() | CancelledCompletion():
                return record.lane
            case OpenedEpisode() | FinishedEpisode() | DeliveredCompletion():
                return group_partition(record.group_id, partitions=self._group_partitions)
        raise TypeError(f"the gateway writes no {type(record).__name__}")
