"""Writes that a client has a completion, before the client has its last byte.

An agent that has its answer may finish its episode, whatever happens to this process in between.
So the record stands first: after a crash the manifest contains every completion that an agent has
had in full. What is left is the other side: a client may leave while the record is written. Then a
second record withdraws the first one.
"""

from collections import Counter
from collections.abc import Callable

from forgemq_contracts.completions import DeliveredCompletion
from forgemq_gateway.clock import Clock
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.history import KnownCompletion
from forgemq_gateway.outbox import Outbox
from forgemq_gateway.wire import ClientGoneError


class Deliveries:
    """Deliveries of all episodes, and the clients that each completion is written to."""

    def __init__(self, outbox: Outbox, *, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self._clients: Counter[str] = Counter()

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
        self._clients[request_id] += 1
        try:
            if request_id not in episode.delivered:
                await self._write(episode, request_id)
                episode.delivered.add(request_id)
            if not has_left():
                return
            if self._clients[request_id] == 1:
                # Before the write: the same body may come again at once and continues the turn.
                episode.delivered.discard(request_id)
                await self._write(episode, request_id, is_withdrawn=True)
        finally:
            self._clients -= Counter((request_id,))
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
