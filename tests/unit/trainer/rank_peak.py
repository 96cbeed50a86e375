"""How much a rank holds at most, without what gloo's threads hold by chance.

A thread of gloo lets go of a buffer only when it gets the processor, which may be after the caller
went on and made its next tensor. About one in six measurements was up to 12 % too high.
"""

import time
from collections.abc import Callable, Sequence

from torch import Tensor
from torch_allocation import peak_allocated_bytes

from forgemq_trainer.ranks.rank_group import RankGroup

MEASUREMENTS = 3

SETTLE_S = 0.002
"""For a thread of gloo to get the processor."""


class SettledGroup(RankGroup):
    """A group whose threads hold nothing of a swap any more once it has returned."""

    def swap(self, own: Tensor, *, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """As of the ranks."""
        result = super().swap(own, given=given, taken=taken)
        time.sleep(SETTLE_S)
        return result


def settled(group: RankGroup) -> SettledGroup:
    """The same group."""
    return SettledGroup(group.rank, group.world_size, group.group)


def least_peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that torch held on this rank in a run: the least of several measurements."""
    return min(peak_allocated_bytes(run) for _ in range(MEASUREMENTS))
