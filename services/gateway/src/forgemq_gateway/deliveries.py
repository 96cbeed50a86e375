"""Writes that a client has a completion, before the client has its last byte.

An agent that has its answer may finish its episode, whatever happens to this process in between.
So the record stands first: after a crash the manifest contains every completion that an agent has
had in full. What is left is the other side: a client may leave while the record is written. Then a
second record withdraws the first one.
"""

from collections.abc import Callable

from msgspec import Struct

from forgemq_contracts.completions import DeliveredCompletion
from forgemq_gateway.clock import Clock
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.history import KnownCompletion
from forgemq_gateway.outbox import Outbox
from forgemq_gateway.wire import ClientGoneError


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
        self, episode: HeldEpisode, completion: KnownCompletion, *, has_left: Callable[[], bool]
    ) -> None:
        """Write the record, once for each completion; afterwards the last byte may be sent.

        Raises:
            ClientGoneError: the client left meanwhile, and no other one has the answer.
            LogError: the record is not on the log; the completion is not delivered.
        """
        request_id = completion.request_id
        if has_left():
            raise ClientGoneError
        delivery = self._under_way.setdefault(request_id, Delivery())
        delivery.clients += 1
        try:
            if request_id not in episode.delivered:
                await self._write(episode, request_id)
                episode.delivered.add(request_id)
            if not has_left():
                delivery.is_had = True
                return
            if delivery.clients == 1 and not delivery.is_had:
                # Before the write: the same body may come again at once and continues the turn.
                episode.delivered.discard(request_id)
                await self._write(episode, request_id, is_withdrawn=True)
        finally:
            delivery.clients -= 1
            if not delivery.clients:
                del self._under_way[request_id]
        raise ClientGoneError

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
