"""The slots of steps that are trained but not served yet: what keeps G3's bound.

The derivation, with a worked example, is docs/staleness.md. What it needs of this file:

    A slot whose group was taken for step k is free once the lanes serve version k + 1 or newer.

So a group that is admitted while version v serves has at most P * v + N - 1 groups before it that a
step took or may still take: P of each of the steps 0 to v - 1, and one for each other slot. If
the slots were free as soon as a step is scheduled, or trained, more would be before it, and the
bound would not hold.
"""

from forgemq_scheduler.core.snapshot import TakenStep


class Slots:
    """Trained steps that still hold their slots.

    Life of a step: scheduled (its groups are open and hold their slots themselves) -> `hold` when
    it is trained and its groups retire -> its slots count as free when its weights serve ->
    forgotten when they serve and a checkpoint contains the step.

    A step is not forgotten at its first moment of being served, because a trainer that restarts
    from an older checkpoint takes the served version back: the slots of the steps that it repeats
    are then held again.

    Example, P=2: steps 0 and 1 are trained, version 1 is served: step 1 holds 2 slots, step 0
    none. The trainer falls back to the base model, version 0: they hold 4 slots again.
    """

    def __init__(self) -> None:
        self._holding: dict[int, TakenStep] = {}
        self._checkpoint_step = -1

    def hold(self, taken: TakenStep, *, checkpoint_step: int) -> None:
        """Keep the slots of a step that was just trained.

        Args:
            taken: The step.
            checkpoint_step: Newest step that a checkpoint contains; -1 if there is none.
        """
        self._holding[taken.step] = taken
        self._checkpoint_step = max(self._checkpoint_step, checkpoint_step)

    def forget_served(self, version: int) -> None:
        """Forget steps whose weights serve and that no trainer restart can take back."""
        for step in [step for step in self._holding if step <= self._checkpoint_step]:
            if step < version:
                del self._holding[step]

    def held(self, queue: int, *, version: int) -> int:
        """Slots of a queue that trained steps still hold while this version serves.

        A group that the trainer could not load counts like the others of its step: it was taken,
        and if its slot were free, more groups could be admitted than the bound allows.
        """
        return sum(taken.slots[queue] for taken in self._holding.values() if taken.step >= version)

    def snapshot(self) -> tuple[int, tuple[TakenStep, ...]]:
        """checkpoint_step, and the steps by number."""
        return self._checkpoint_step, tuple(self._holding[step] for step in sorted(self._holding))

    def restore(self, *, checkpoint_step: int, holding: tuple[TakenStep, ...]) -> None:
        """Replace all state with that of `snapshot`."""
        self._checkpoint_step = checkpoint_step
        self._holding = {taken.step: taken for taken in holding}
