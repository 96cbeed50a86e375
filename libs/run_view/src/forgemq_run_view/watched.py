"""What a stall is judged by: open groups with their times, and how long things usually take."""

from collections import deque
from dataclasses import dataclass, field

WAITS_KEPT_MAX = 256
"""The newest ones: what is usual changes as episodes become longer."""
WAITS_MIN = 8
"""Fewer say nothing about what is usual."""
USUAL_SHARE = 0.95
"""Of the waits are no longer than a usual one, so a single long outage does not become usual."""
UNUSUAL_TIMES = 3
"""So many times a usual wait is unusual."""


class Waits:
    """How long one kind of waiting takes, in milliseconds."""

    def __init__(self) -> None:
        self._newest: deque[int] = deque(maxlen=WAITS_KEPT_MAX)

    def add(self, wait_ms: int) -> None:
        """Note a wait that has ended."""
        self._newest.append(max(0, wait_ms))

    def limit_ms(self, at_least_ms: float, *, at_first_ms: float = 0.0) -> float:
        """Longest wait that is nothing unusual.

        Args:
            at_least_ms: A shorter one is never unusual.
            at_first_ms: The same while too little is known of what is usual.
        """
        if len(self._newest) < WAITS_MIN:
            return max(at_least_ms, at_first_ms)
        usual = sorted(self._newest)[int(USUAL_SHARE * (len(self._newest) - 1))]
        return max(at_least_ms, UNUSUAL_TIMES * usual)


@dataclass(slots=True)
class WatchedGroup:
    """An open group and when each thing last happened to it; 0: it has not happened.

    `sign_ms` is the newest sign that somebody plays it: a completion or the end of an episode.
    """

    group_id: str
    domain: str = ""
    purpose: str = ""
    queue_index: int | None = None
    group_size: int = 0
    requested_ms: int = 0
    admitted_ms: int = 0
    sign_ms: int = 0
    longest_silence_ms: int = 0
    scored_ms: int = 0
    merged_ms: int = 0
    is_live: bool = False
    is_ready: bool = False
    is_scheduled: bool = False
    finished: set[int] = field(default_factory=set)

    @property
    def is_played(self) -> bool:
        """Whether all of its episodes have ended."""
        return bool(self.admitted_ms) and len(self.finished) >= self.group_size

    @property
    def is_playing(self) -> bool:
        """Whether the run's agents have some episode of it to play."""
        is_over = self.is_live or self.is_played or self.scored_ms or self.merged_ms
        return bool(self.admitted_ms) and not is_over

    @property
    def heard_ms(self) -> int:
        """When something last came of it; its admission before that."""
        return max(self.admitted_ms, self.sign_ms)

    def hear(self, at_ms: int) -> None:
        """Note a sign that somebody plays it."""
        before = self.heard_ms
        if before:
            self.longest_silence_ms = max(self.longest_silence_ms, at_ms - before)
        self.sign_ms = max(self.sign_ms, at_ms)
