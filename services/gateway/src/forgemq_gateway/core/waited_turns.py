"""Turns that clients wait for, by the lane that works on them and by their deadlines.

A tick several times a second asks who is late and who is on a silent lane: what it costs follows
from their number and from the number of lanes, not from the number of turns.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from forgemq_gateway.core.completion_tokens import LaneEpoch
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.turns import OpenTurn

_NO_LANE: LaneEpoch = (-1, -1)

# Deadlines of turns that have ended stay until they are as many as those of open turns, and these.
_ENDED_DEADLINES = 64


class WaitedTurn(NamedTuple):
    """A turn that clients wait for."""

    episode: HeldEpisode
    turn: OpenTurn


class WaitedTurns:
    """Each turn is on the lane that its fields name; `place` alone writes those."""

    def __init__(self) -> None:
        self._turns: dict[str, WaitedTurn] = {}
        self._on: dict[LaneEpoch, dict[str, WaitedTurn]] = {}
        self._deadlines: list[tuple[int, str]] = []

    def __contains__(self, turn: OpenTurn) -> bool:
        return self._waited(turn) is not None

    def __iter__(self) -> Iterator[WaitedTurn]:
        return iter(self._turns.values())

    def add(self, episode: HeldEpisode, turn: OpenTurn) -> None:
        """Add a turn; it takes the place of an abandoned one with the same id."""
        if turn in self:
            return
        earlier = self._turns.get(turn.request_id)
        if earlier is not None:
            self.remove(earlier.turn)
        waited = self._turns[turn.request_id] = WaitedTurn(episode, turn)
        self._on.setdefault(_lane_of(turn), {})[turn.request_id] = waited
        heapq.heappush(self._deadlines, (turn.deadline_ms, turn.request_id))
        if len(self._deadlines) > 2 * len(self._turns) + _ENDED_DEADLINES:
            self._deadlines = [
                (each.turn.deadline_ms, request) for request, each in self._turns.items()
            ]
            heapq.heapify(self._deadlines)

    def get(self, request_id: str) -> WaitedTurn | None:
        """The turn of this request; None if no client waits for it."""
        return self._turns.get(request_id)

    def remove(self, turn: OpenTurn) -> WaitedTurn | None:
        """Remove a turn and return it; None if it is not here."""
        waited = self._waited(turn)
        if waited is not None:
            del self._turns[turn.request_id]
            self._take_off(turn)
        return waited

    def place(self, turn: OpenTurn, *, lane: int, epoch: int) -> None:
        """Note which lane works on the turn, which need not be here; -1 for none."""
        waited = self._waited(turn)
        if waited is not None:
            self._take_off(turn)
        turn.lane, turn.epoch = lane, epoch
        if waited is not None:
            self._on.setdefault(_lane_of(turn), {})[turn.request_id] = waited

    def lanes(self) -> list[LaneEpoch]:
        """Every lane that has a turn, with the epoch it was given under."""
        return [lane for lane in self._on if lane != _NO_LANE]

    def on(self, lane: int, epoch: int) -> list[WaitedTurn]:
        """The turns that this lane has under this epoch."""
        return list(self._on.get((lane, epoch), {}).values())

    def without_lane(self) -> list[WaitedTurn]:
        """The turns that no lane has."""
        return self.on(*_NO_LANE)

    def late(self, wall_ms: int) -> list[WaitedTurn]:
        """The turns whose deadline is before this time and that a lane has had."""
        late, again = [], []
        while self._deadlines and self._deadlines[0][0] < wall_ms:
            _, request_id = heapq.heappop(self._deadlines)
            waited = self._turns.get(request_id)
            if waited is None:
                continue
            # Looked at again: a client that joins moves the deadline, and a lane may yet be found.
            again.append((max(waited.turn.deadline_ms, wall_ms), request_id))
            if waited.turn.sent and waited.turn.deadline_ms < wall_ms:
                late.append(waited)
        for entry in again:
            heapq.heappush(self._deadlines, entry)
        return late

    def _waited(self, turn: OpenTurn) -> WaitedTurn | None:
        waited = self._turns.get(turn.request_id)
        return waited if waited is not None and waited.turn is turn else None

    def _take_off(self, turn: OpenTurn) -> None:
        lane = _lane_of(turn)
        del self._on[lane][turn.request_id]
        if not self._on[lane]:
            del self._on[lane]

    def _check(self) -> None:
        """Every turn is on exactly the lane that it names, and has a deadline to be looked at."""
        placed = {(lane, request) for lane, turns in self._on.items() for request in turns}
        assert placed == {(_lane_of(each.turn), request) for request, each in self._turns.items()}
        assert self._turns.keys() <= {request for _, request in self._deadlines}


def _lane_of(turn: OpenTurn) -> LaneEpoch:
    return _NO_LANE if turn.lane < 0 else (turn.lane, turn.epoch)
