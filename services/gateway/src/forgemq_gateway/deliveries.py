"""Writes that a client has a completion, before the client has its last byte.

An agent that has its answer may finish its episode, whatever happens to this process in between.
So the record stands first: after a crash the manifest contains every completion that an agent has
had in full. What is left is the other side: a client may leave while the record is written. Then a
second record withdraws the first one. The choices of one answer are delivered together or not at
all.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from forgemq_bus.errors import LogError
from forgemq_contracts.completions import DeliveredCompletion
from forgemq_gateway.clock import Clock
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.outbox import Outbox
from forgemq_gateway.wire import ClientGoneError, HasLeft


class Delivery(Struct):
    """One completion that is being written to clients.

    Attributes:
        clients: Those that wait for its record.
        is_had: Whether one of them was still there when the record was on the log.
    """

    clients: int = 0
    is_had: bool = False


class Deliveries:
    """Deliveries of all episodes; several clients may wait for the same completion."""

    def __init__(self, outbox: Outbox, *, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self._under_way: dict[str, Delivery] = {}

    async def record(
        self,
        episode: HeldEpisode,
        completions: Sequence[KnownCompletion],
        *,
        has_left: HasLeft,
    ) -> None:
        """Write a record for each completion, once; afterwards the last byte may be sent.

        Raises:
            ClientGoneError: the client left meanwhile, and no other one has the answer.
            LogError: a record is not on the log; its completion is not delivered.
        """
        if has_left():
            raise ClientGoneError
        ids = [completion.request_id for completion in completions]
        episode.recorded.update(ids)
        with self._client_of(ids) as deliveries:
            try:
                await self._write_new(episode, ids)
            except LogError:
                # Another client may have left behind its record: the repetition gets the answer.
                episode.delivered.difference_update(_nobodys(ids, deliveries))
                raise
            if not has_left():
                for delivery in deliveries:
                    delivery.is_had = True
                return
            alone = _nobodys(ids, deliveries)
            # Before the writes: the same body may come again at once and continues the turns.
            episode.delivered.difference_update(alone)
            for request_id in alone:
                await self._write(episode, request_id, is_withdrawn=True)
        raise ClientGoneError

    async def _write_new(self, episode: HeldEpisode, ids: Sequence[str]) -> None:
        """Write the records that are missing at once; each counts when it is on the log."""

        async def write(request_id: str) -> None:
            await self._write(episode, request_id)
            episode.delivered.add(request_id)

        missing = [write(request_id) for request_id in ids if request_id not in episode.delivered]
        if len(missing) == 1:  # Nearly always: no task for it.
            await missing[0]
            return
        for error in await asyncio.gather(*missing, return_exceptions=True):
            if error is not None:
                raise error

    @contextmanager
    def _client_of(self, ids: Sequence[str]) -> Iterator[list[Delivery]]:
        """Count a client of these completions."""
        deliveries = [self._under_way.setdefault(each, Delivery()) for each in ids]
        for delivery in deliveries:
            delivery.clients += 1
        try:
            yield deliveries
        finally:
            for request_id, delivery in zip(ids, deliveries, strict=True):
                delivery.clients -= 1
                if not delivery.clients:
                    del self._under_way[request_id]

    async def _write(
        self, episode: HeldEpisode, request_id: str, *, is_withdrawn: bool = False
    ) -> None:
        record = DeliveredCompletion(
            request_id=request_id,
            episode_id=episode.episode_id,
            group_id=episode.opened.group_id,
            delivered_ms=self._clock.wall_ms(),
            is_withdrawn=is_withdrawn,
        )
        await self._outbox.write(record)


def _nobodys(ids: Sequence[str], deliveries: Sequence[Delivery]) -> list[str]:
    """Those that no client has had, and that only this one still waits for."""
    return [
        request_id
        for request_id, delivery in zip(ids, deliveries, strict=True)
        if delivery.clients == 1 and not delivery.is_had
    ]
