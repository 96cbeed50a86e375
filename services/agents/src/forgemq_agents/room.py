"""Room for episodes: how many are played at once, and which goes next.

Training goes first, as the next step waits for it. Evaluations take what training leaves, and at
least a share, so that they end. Within each, who came first goes first.
"""

import asyncio
from collections import deque

EVALUATION_SHARE = 4
"""One place in so many, and at least one, goes to an evaluation if it waits for one."""


class Reservation:
    """Room for one episode."""

    def __init__(self, room: "Room", *, is_training: bool) -> None:
        self._room = room
        self.is_training = is_training

    def leave(self) -> None:
        """Give the place to who waits."""
        self._room.take_back(self)


class Room:
    """A bound on episodes at once, shared by training and evaluation.

    Example: of 8 places evaluations may keep 2 while training waits, and all 8 while it does not.
    """

    def __init__(self, places_max: int) -> None:
        self._free = places_max
        self._evaluations_min = max(1, places_max // EVALUATION_SHARE)
        self._evaluations = 0
        self._training: deque[asyncio.Future[Reservation]] = deque()
        self._evaluating: deque[asyncio.Future[Reservation]] = deque()

    async def enter(self, *, is_training: bool) -> Reservation:
        """Wait for a place."""
        place: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        (self._training if is_training else self._evaluating).append(place)
        self._give()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                place.result().leave()
            raise

    def take_back(self, place: Reservation) -> None:
        """Note that this place is free; each place leaves once."""
        self._free += 1
        self._evaluations -= not place.is_training
        self._give()

    def _give(self) -> None:
        while self._free and (waiting := self._next()):
            place = waiting.popleft()
            is_training = waiting is self._training
            self._free -= 1
            self._evaluations += not is_training
            place.set_result(Reservation(self, is_training=is_training))

    def _next(self) -> "deque[asyncio.Future[Reservation]]":
        """Those of whom the first gets the next place; empty if nobody waits."""
        for waiting in (self._training, self._evaluating):
            while waiting and waiting[0].cancelled():
                waiting.popleft()
        is_owed = self._evaluations < self._evaluations_min
        if self._evaluating and (is_owed or not self._training):
            return self._evaluating
        return self._training
