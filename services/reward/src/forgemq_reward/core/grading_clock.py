"""How long a grading has worked, without the time for which it waited for others."""


class GradingClock:
    """Runs from its making; times are monotonic seconds."""

    def __init__(self, *, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._worked_s = 0.0
        self._works_since_s: float | None = now_s

    def note(self, *, is_waiting: bool, now_s: float) -> None:
        """Stand still while the grading waits; idempotent."""
        self._worked_s = self._worked_until(now_s)
        self._works_since_s = None if is_waiting else now_s

    def left_s(self, now_s: float) -> float:
        """The time for which it may work from now on; below 0 if it has worked for too long."""
        return self._limit_s - self._worked_until(now_s)

    def _worked_until(self, now_s: float) -> float:
        if self._works_since_s is None:
            return self._worked_s
        return self._worked_s + now_s - self._works_since_s
