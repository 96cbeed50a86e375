"""Which requests are served now, which wait, and which are refused: each key has its share.

A place is held from the head of a request to the end of its answer. If all places are taken, each
key's requests wait in a queue of their own, and a place that becomes free goes to the key that
holds fewest. Pure: the caller keeps the time, and wakes the requests that get a place.

Source: max-min fairness, Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2.
"""

import math
from collections import deque

from msgspec import Struct

from forgemq_gateway.core.errors import RefusedError, busy

BURST_S = 1.0
"""A key may be so far ahead of its rate: parallel calls come at once."""

_KEYS_KEPT_MIN = 1024
"""Keys without a request are looked for when there are twice as many as were left last time."""


class Limits(Struct, frozen=True, kw_only=True):
    """How many requests there may be.

    Attributes:
        requests_max: With a place, of all keys.
        waiting_max: Without a place, of all keys.
        key_requests_max: Of one key, with a place or without.
        key_rate_per_s_max: Of one key, in the long run.
    """

    requests_max: int
    waiting_max: int
    key_requests_max: int
    key_rate_per_s_max: float


class Ticket(Struct, kw_only=True, eq=False):
    """One request of a key, from its arrival until it leaves.

    Attributes:
        is_out: Whether it lost its place in the queue; it is to be refused.
        pushed_out: The request that lost its place in the queue to this one.
    """

    key: str
    has_place: bool = False
    is_out: bool = False
    pushed_out: "Ticket | None" = None


class _Key(Struct, kw_only=True, eq=False):
    """The requests of one key; `due_s` is when its next one would be on time at the full rate."""

    placed: int = 0
    waiting: deque[Ticket]
    due_s: float = 0.0


class Admission:
    """Places, and the queues of those that wait for one.

    Example: two places, both held by key a, which has a third request that waits. Key b asks: it
    waits too. The first request of a leaves: b holds none, a holds one, so b gets the place.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._keys: dict[str, _Key] = {}
        # Keys with requests that wait, by the places that they hold, in the order they came.
        self._queues: dict[int, dict[str, None]] = {}
        self.placed = 0
        self.waiting = 0
        self._sweep_at = 2 * _KEYS_KEPT_MIN

    def arrive(self, key: str, *, now_s: float) -> Ticket:
        """Take a request in, with a place if one is free.

        If the queue is full, the key that has most in it loses its newest request to a key that
        would have fewer.

        Raises:
            RefusedError: 429, a limit of its key is reached or too many wait.
        """
        self._sweep(now_s)
        held, limits = self._keys.get(key) or _Key(waiting=deque()), self._limits
        if held.placed + len(held.waiting) >= limits.key_requests_max:
            raise busy(
                f"this key has {limits.key_requests_max} requests open already",
                limit="key_requests",
            )
        early_s = held.due_s - now_s - BURST_S
        if early_s > 0:
            raise busy(
                f"this key sends more than {limits.key_rate_per_s_max:g} requests a second",
                retry_after_s=math.ceil(early_s),
                limit="key_rate",
            )
        has_place = self.placed < limits.requests_max
        pushed_out = None if has_place else self._make_room(held)
        held.due_s = max(held.due_s, now_s) + 1 / limits.key_rate_per_s_max
        self._keys[key] = held
        ticket = Ticket(key=key, pushed_out=pushed_out)
        if has_place:
            self._give_place(ticket, held)
        else:
            self._wait(ticket, held)
        return ticket

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """Take a request out; returns those that now have its place."""
        if ticket.is_out:
            return []
        held = self._keys[ticket.key]
        if ticket.has_place:
            self._take_place(ticket.key, held)
        else:
            self._drop(ticket, held)
        return self._fill()

    def _make_room(self, held: _Key) -> Ticket | None:
        """Push a request out of a full queue, for one more of this key."""
        if self.waiting < self._limits.waiting_max:
            return None
        queued = (key for queue in self._queues.values() for key in queue)
        fullest = max((self._keys[key] for key in queued), key=lambda each: len(each.waiting))
        if len(fullest.waiting) <= len(held.waiting) + 1:
            raise no_place()
        newest = fullest.waiting[-1]
        newest.is_out, newest.pushed_out = True, None
        self._drop(newest, fullest)
        return newest

    def _drop(self, ticket: Ticket, held: _Key) -> None:
        held.waiting.remove(ticket)
        self.waiting -= 1
        if not held.waiting:
            self._unqueue(ticket.key, held)

    def _fill(self) -> list[Ticket]:
        given: list[Ticket] = []
        while self.waiting and self.placed < self._limits.requests_max:
            # One for each number of places that a key may hold: at most `key_requests_max`.
            key = next(iter(self._queues[min(self._queues)]))
            held = self._keys[key]
            self._unqueue(key, held)
            ticket = held.waiting.popleft()
            self.waiting -= 1
            self._give_place(ticket, held)
            if held.waiting:
                self._enqueue(key, held)
            given.append(ticket)
        return given

    def _give_place(self, ticket: Ticket, held: _Key) -> None:
        ticket.has_place = True
        self.placed += 1
        held.placed += 1

    def _wait(self, ticket: Ticket, held: _Key) -> None:
        if not held.waiting:
            self._enqueue(ticket.key, held)
        held.waiting.append(ticket)
        self.waiting += 1

    def _take_place(self, key: str, held: _Key) -> None:
        self.placed -= 1
        if held.waiting:
            self._unqueue(key, held)
        held.placed -= 1
        if held.waiting:
            self._enqueue(key, held)

    def _enqueue(self, key: str, held: _Key) -> None:
        self._queues.setdefault(held.placed, {})[key] = None

    def _unqueue(self, key: str, held: _Key) -> None:
        queue = self._queues[held.placed]
        del queue[key]
        if not queue:
            del self._queues[held.placed]

    def _sweep(self, now_s: float) -> None:
        """Forget keys that have no request and whose rate is at rest; O(1) for each arrival."""
        if len(self._keys) < self._sweep_at:
            return
        self._keys = {
            key: held
            for key, held in self._keys.items()
            if held.placed or held.waiting or held.due_s > now_s
        }
        self._sweep_at = 2 * max(len(self._keys), _KEYS_KEPT_MIN)

    def _check(self) -> None:
        """Every place is counted once, and none is free while a request waits."""
        assert self.placed == sum(held.placed for held in self._keys.values())
        assert self.waiting == sum(len(held.waiting) for held in self._keys.values())
        assert self.placed <= self._limits.requests_max
        assert not self.waiting or self.placed == self._limits.requests_max
        queued = {key: n for n, queue in self._queues.items() for key in queue}
        assert queued == {key: held.placed for key, held in self._keys.items() if held.waiting}


def no_place() -> RefusedError:
    """429: more requests are open than the gateway takes."""
    return busy("the gateway has as many requests open as it takes", limit="requests")
