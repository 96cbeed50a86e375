"""After which steps a checkpoint is written: every so many, or by what one costs.

By cost if `trainer.checkpoint_every_steps` is 1: the next one is due at the end of the first step
that ends so long after the newest was due that writing takes at most a share of that time. Its cost
is the time that the newest took to be written and read back, as if nothing had been computed beside
it. A life's first step always gets one: its cost is then known, a disk that is too small shows at
once, and a run whose lives are short still advances.
"""

from forgemq_contracts.run import Trainer


class CheckpointPace:
    """Decides for one life of the trainer.

    Example: a share of 0.05, a step each 60 s, a checkpoint takes 30 s. One is due after the step
    that ends at 60 s, and the next after 30 / 0.05 = 600 s more: after every tenth step. A crash
    then costs at most ten steps, which are trained again.
    """

    def __init__(self, settings: Trainer) -> None:
        """No checkpoint was written in this life."""
        self._every_steps = settings.checkpoint_every_steps
        self._share_max = settings.checkpoint_share_max
        self._newest_due_s: float | None = None
        self._cost_s = 0.0

    def is_due(self, step: int, *, is_last: bool, now_s: float) -> bool:
        """Whether a step that has just ended gets a checkpoint; asked once for each step.

        Args:
            step: Its number.
            is_last: True for the run's last, which always gets one.
            now_s: A clock's time.
        """
        if self._every_steps > 1:
            return is_last or (step + 1) % self._every_steps == 0
        newest_s = self._newest_due_s
        is_due = is_last or newest_s is None or self._cost_s <= self._share_max * (now_s - newest_s)
        if is_due:
            self._newest_due_s = now_s
        return is_due

    def took(self, seconds: float) -> None:
        """Note how long the newest checkpoint took to be written and read back."""
        self._cost_s = seconds
