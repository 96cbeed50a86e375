"""The time that generation stood still."""

import time


class PauseClock:
    """Seconds that generation was paused so far, so that times in the engine can leave them out.

    Example: paused from 10 s to 12 s and again since 20 s, `total_s` is 3 at 21 s.
    """

    def __init__(self) -> None:
        """Start unpaused, at 0 s."""
        self._ended_s = 0.0
        self._since_s: float | None = None

    @property
    def is_paused(self) -> bool:
        """Whether a pause is going on."""
        return self._since_s is not None

    @property
    def total_s(self) -> float:
        """All pauses, the present one up to now."""
        present_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        return self._ended_s + present_s

    def pause(self) -> None:
        """Begin a pause, unless one is going on."""
        if self._since_s is None:
            self._since_s = time.monotonic()

    def resume(self) -> None:
        """End the pause, if there is one."""
        self._ended_s, self._since_s = self.total_s, None
