"""Commits from where a restart of the grading has to read, one transactional writer a partition.

The writer says who owns a partition: opening it fences the previous owner, so it is opened when the
group assigns the partition and at no other time, and before anything of the previous owner is read.
"""

import asyncio

from forgemq_bus.errors import FencedError
from forgemq_bus.log import Log, Place, TransactionWriter
from forgemq_contracts import topics
from forgemq_reward.core.pending import PendingPositions
from forgemq_telemetry.telemetry import Telemetry

GROUP = "reward-grading"


class GradingPositions:
    """Committed positions of the partitions that this process holds.

    Life of a partition: `take_over`, any number of `commit`, `give_up`.
    """

    def __init__(self, log: Log, telemetry: Telemetry) -> None:
        self._log = log
        self._telemetry = telemetry
        self._writers: dict[int, TransactionWriter | None] = {}
        self._floors: dict[int, dict[Place, int]] = {}
        self._committed: dict[int, PendingPositions] = {}
        # A partition that is given up must not be committed afterwards: its next owner has read it.
        self._gate = asyncio.Lock()

    async def take_over(self, partition: int) -> dict[Place, int]:
        """Own the partition; returns what is committed for it."""
        async with self._gate:
            return await self._open(partition)

    async def _open(self, partition: int) -> dict[Place, int]:
        writer = await self._log.transaction_writer(f"{GROUP}-{partition}")
        places = list(_places(partition, PendingPositions(episodes=0, completions=0, grades=0)))
        self._writers[partition] = writer
        self._floors[partition] = await self._log.committed(group=GROUP, places=places)
        self._committed.pop(partition, None)
        return self._floors[partition]

    async def commit(self, partition: int, positions: PendingPositions) -> None:
        """Commit these positions if they changed and the partition is held.

        If a newer writer fenced this one, the next call opens it again. Either the group has given
        the partition to another process, of which this one is notified before that; or a process
        that had stood still woke up and took it, and will be notified of its loss.
        """
        async with self._gate:
            if partition not in self._writers or self._committed.get(partition) == positions:
                return
            if self._writers[partition] is None:
                await self._open(partition)
            writer, floors = self._writers[partition], self._floors[partition]
            # What another owner has committed since is a fact: everything below it is graded, and
            # may be trimmed.
            places = {
                place: position
                for place, position in _places(partition, positions).items()
                if position > floors.get(place, -1)
            }
            try:
                if writer is not None and places:
                    await writer.commit(outputs=(), group=GROUP, positions=places)
            except FencedError as error:
                self._telemetry.event("grading_fenced", partition=partition, error=str(error))
                await self._close(partition)
                self._writers[partition] = None
            else:
                self._committed[partition] = positions

    async def give_up(self, partitions: frozenset[int]) -> None:
        """Commit nothing more for these partitions; returns once no commit is on its way."""
        async with self._gate:
            for partition in partitions & self._writers.keys():
                await self._close(partition)
                del self._writers[partition]

    async def close(self) -> None:
        """Give up everything."""
        await self.give_up(frozenset(self._writers))

    async def _close(self, partition: int) -> None:
        writer = self._writers[partition]
        if writer is not None:
            await writer.close()


def _places(partition: int, positions: PendingPositions) -> dict[Place, int]:
    """By partition of the log; without those that are not known."""
    named = (
        (topics.FINISHED_EPISODES, positions.episodes),
        (topics.FINISHED_COMPLETIONS, positions.completions),
        (topics.GRADED_EPISODES, positions.grades),
    )
    return {
        Place(topic.name, partition): position for topic, position in named if position is not None
    }
