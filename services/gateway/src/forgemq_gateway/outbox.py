"""Writes the gateway's records."""

from msgspec import Struct

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
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.records import emit_of


class Outbox:
    """One method per record; each returns when the record is durable."""

    def __init__(
        self, writer: Writer, *, configuration: RunConfiguration, dead_letters: DeadLetters
    ) -> None:
        self._writer = writer
        self._dead_letters = dead_letters
        self._group_partitions = configuration.log.group_partitions
        self._queues = {queue.domain: number for number, queue in enumerate(configuration.queues)}

    async def group_requested(self, record: RequestedGroup) -> None:
        """A group waits for its slot."""
        place = self._queues[record.domain]
        await self._write(topics.REQUESTED_GROUPS, place, record)

    async def episode_opened(self, record: OpenedEpisode) -> None:
        """An agent holds an episode."""
        await self._write(topics.OPENED_EPISODES, self._of_group(record.group_id), record)

    async def episode_finished(self, record: FinishedEpisode) -> None:
        """An episode has ended."""
        await self._write(topics.FINISHED_EPISODES, self._of_group(record.group_id), record)

    async def completion_requested(
        self, record: RequestedCompletion, *, headers: Headers = ()
    ) -> None:
        """A lane has work."""
        await self._write(topics.REQUESTED_COMPLETIONS, record.lane, record, headers=headers)

    async def completion_cancelled(self, record: CancelledCompletion) -> None:
        """A lane may stop."""
        await self._write(topics.CANCELLED_COMPLETIONS, record.lane, record)

    async def completion_delivered(self, record: DeliveredCompletion) -> None:
        """A client has its answer."""
        await self._write(topics.DELIVERED_COMPLETIONS, self._of_group(record.group_id), record)

    async def buried(self, record: Record, *, reason: str) -> bool:
        """A record that does not decode stands in its dead letter topic; False: others bury it."""
        return await self._dead_letters.bury(record, reason)

    def _of_group(self, group_id: str) -> int:
        return group_partition(group_id, partitions=self._group_partitions)

    async def _write(
        self, topic: topics.Topic, partition: int, record: Struct, *, headers: Headers = ()
    ) -> None:
        output = Output(topic=topic.name, partition=partition, record=record)
        await self._writer.write(emit_of(output, headers=headers))
