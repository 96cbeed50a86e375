"""Where a process is killed, stands still or gets no answer from the log.

A process reaches a numbered point before and after each of its calls to the log. What happens there
is drawn from a seed, or given by number: so all points of a case can be tried one by one.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Point = Literal[
    "open_writer", "opened_writer", "positions", "reader", "read", "commit", "promise", "written",
    "committed", "asked", "sampled", "answered",
]  # fmt: skip
"""A promise is a commit of what a gateway answers with 200. The last three are an engine's: it has
read a request, has a completion, and has written it."""

FaultKind = Literal["kill", "pause", "no_answer"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a process at a point; `pause_s` is 0 unless it stands still."""

    kind: FaultKind
    pause_s: float = 0.0


class Faults(Protocol):
    """Decides what happens at each point that a process reaches."""

    def at(self, point: Point) -> Fault | None:
        """The fault at this point, this time; None: the process goes on."""
        ...


class SeededFaults:
    """Draws faults until there were `faults_max`, so that every schedule comes to rest.

    Args:
        kinds: Each is as probable as the others.
        points: The only ones at which faults happen; empty: they happen at all.
        pause_s: Shortest and longest time that a process stands still.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        probability: float,
        faults_max: int,
        kinds: Sequence[FaultKind] = get_args(FaultKind),
        points: Collection[Point] = (),
        pause_s: tuple[float, float] = (0.1, 6.0),
    ) -> None:
        self._rng = rng
        self._probability = probability
        self._left = faults_max
        self._kinds = kinds
        self._points = points
        self._pause_s = pause_s

    def at(self, point: Point) -> Fault | None:
        """One of the kinds, or none."""
        if self._points and point not in self._points:
            return None
        if self._left == 0 or self._rng.random() >= self._probability:
            return None
        self._left -= 1
        kind = self._rng.choice(self._kinds)
        return Fault(kind, self._rng.uniform(*self._pause_s) if kind == "pause" else 0.0)


class NumberedFaults:
    """Faults at the n-th points of a schedule, counted from 0; counts all points."""

    def __init__(self, faults: Mapping[int, Fault] | None = None) -> None:
        self._faults = dict(faults or {})
        self.points: list[Point] = []

    def at(self, point: Point) -> Fault | None:
        """The fault with the number of this point."""
        self.points.append(point)
        return self._faults.get(len(self.points) - 1)
