"""How long the trainer waits for an object store or blob store that is away.

Another life would load the model and train again what was computed since the newest checkpoint.
So it waits longer than other services, which end after 30 s and lose nothing by a restart.
"""

AWAY_S_MAX = 300.0
"""From the first failure of several in a row. Of several ranks the others wait for the first one
meanwhile, by default up to 1,800 s (`rank_deadline_s`)."""

DELAY_FIRST_S = 1.0
DELAY_S_MAX = 16.0
"""A store that is back is noticed at most so much later."""


class StorePatience:
    """Counts failures in a row; each is followed by a pause that doubles.

    Example: tries at 0, 1, 3, 7, 15 and 31 s fail, and the next are 16 s apart; a failure after
    300 s is the last one.
    """

    def __init__(self) -> None:
        """Nothing has failed."""
        self._since_s: float | None = None
        self._delay_s = DELAY_FIRST_S

    def delay_s(self, *, now_s: float) -> float | None:
        """Seconds from a failure to the next try; None to give up.

        Args:
            now_s: When it failed, by a clock that never goes back.
        """
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= AWAY_S_MAX:
            return None
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, DELAY_S_MAX)
        return delay_s

    def answered(self) -> None:
        """Note that the store is there; the next failure is a first one."""
        self._since_s, self._delay_s = None, DELAY_FIRST_S
