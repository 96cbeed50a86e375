"""One generation queue Q and the window in which its groups may be taken.

Source: windowed FIFO of MiniMax's Forge, arXiv 2605.26494 section 6.
"""

from bisect import bisect_left
from heapq import heapify, heappop, heappush

from forgemq_contracts.groups import MergedGroup


class WindowedFifo:
    """Queue indices in submission order; any finished one of the first W may be taken.

    The window is the first W positions from the head H, the oldest index that is neither taken
    nor retired. An index that retires untrained leaves the queue, and its position goes to the
    next one. A taken index keeps its position until the head has passed it: if it did not, each
    taken group would let one more into the window, and a slow head would be overtaken without end.

    Example: W=3, indices 0 to 4, all but 0 finished. 1 and 2 are taken. 3 is finished but waits,
    because 0, 1 and 2 are the window. 0 retires: H jumps to 3, and 3 and 4 may be taken.

    The last index of the window never falls: whatever leaves the queue moves it up. So a finished
    index enters the window once, and `next_takeable` costs O(log N) however many wait outside.
    """

    def __init__(self, *, window: int) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self._window = window
        self.next_index = 0
        self._order: list[int] = []  # ascending; from H on, taken ones included
        self._taken: set[int] = set()  # members of _order
        self._finished: dict[int, MergedGroup] = {}  # untaken members of _order, oldest first
        self._finish_count = 0
        # Finished indices; those that left the queue are dropped when they come to the top.
        self._outside: list[tuple[int, int]] = []  # heap of (index, number of its finish)
        self._inside: list[tuple[int, int]] = []  # heap of (number of its finish, index)

    @property
    def head(self) -> int | None:
        """Oldest index that is neither taken nor retired; None if the queue is empty."""
        return self._order[0] if self._order else None

    @property
    def untaken_count(self) -> int:
        """Groups in the queue that no step has taken."""
        return len(self._order) - len(self._taken)

    def append(self) -> int:
        """Add a group at the end; returns its queue index."""
        index = self.next_index
        self.next_index += 1
        self._order.append(index)
        return index

    def finish(self, index: int, merged: MergedGroup) -> None:
        """Note that the group can train; it may be taken once it is in the window."""
        if index not in self._finished:
            self._finish_count += 1
            heappush(self._outside, (index, self._finish_count))
        self._finished[index] = merged

    def is_finished(self, index: int) -> bool:
        """Whether the group has finished and no step has taken it."""
        return index in self._finished

    def is_untaken(self, index: int) -> bool:
        """Whether the index is in the queue, finished or not, and no step has taken it."""
        position = bisect_left(self._order, index)
        is_here = position < len(self._order) and self._order[position] == index
        return is_here and index not in self._taken

    def next_takeable(self) -> tuple[int, MergedGroup] | None:
        """The group in the window that finished first; None if nothing may be taken."""
        if not self._finished:
            return None
        last = self._order[min(self._window, len(self._order)) - 1]
        while self._outside and self._outside[0][0] <= last:
            index, number = heappop(self._outside)
            heappush(self._inside, (number, index))
        while self._inside:
            _, index = self._inside[0]
            if index in self._finished:
                return index, self._finished[index]
            heappop(self._inside)
        return None

    def take(self, index: int) -> None:
        """Note that a step has taken the group; the head moves if this was the head."""
        del self._finished[index]
        self._taken.add(index)
        self._drop_taken_head()

    def remove(self, index: int) -> None:
        """Remove a group that retires without being taken."""
        self._finished.pop(index, None)
        position = bisect_left(self._order, index)
        assert self._order[position] == index, f"index {index} is not in the queue"
        del self._order[position]
        self._drop_taken_head()

    def snapshot(
        self,
    ) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[tuple[int, MergedGroup], ...]]:
        """State as (next_index, order, taken, finished with the oldest-finished first)."""
        return (
            self.next_index,
            tuple(self._order),
            tuple(sorted(self._taken)),
            tuple(self._finished.items()),
        )

    def restore(
        self,
        *,
        next_index: int,
        order: tuple[int, ...],
        taken: tuple[int, ...],
        finished: tuple[tuple[int, MergedGroup], ...],
    ) -> None:
        """Replace all state with that of `snapshot`."""
        self.next_index = next_index
        self._order = list(order)
        self._taken = set(taken)
        self._finished = dict(finished)
        self._finish_count = len(finished)
        self._inside = []
        self._outside = [(index, number) for number, (index, _) in enumerate(finished, 1)]
        heapify(self._outside)

    def _drop_taken_head(self) -> None:
        passed = 0
        while passed < len(self._order) and self._order[passed] in self._taken:
            self._taken.remove(self._order[passed])
            passed += 1
        del self._order[:passed]

    def _check(self) -> None:
        assert self._order == sorted(set(self._order)), "queue order must ascend"
        assert not self._order or self._order[-1] < self.next_index, "an index never given out"
        assert self.head not in self._taken, "the head must not be taken"
        assert self._taken <= set(self._order), "taken indices behind the head must be dropped"
        assert set(self._finished) <= set(self._order) - self._taken, "finished implies untaken"
        waiting = {index for index, _ in self._outside} | {index for _, index in self._inside}
        assert set(self._finished) <= waiting, "a finished index waits in or outside the window"
        if self._taken:
            reach = self._order.index(max(self._taken))
            assert reach < self._window, f"position {reach} taken with window {self._window}"
