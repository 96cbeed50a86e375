"""Which group of an engine's processes attends for an episode.

Each group has a K/V cache of its own. SGLang gives requests out in turn, so that a turn would find
the episode's K/V only if its group happens to come up again.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EPISODES_MAX = 65_536
"""That are remembered: a few MB. One that was forgotten gets a group as a new one does."""


class AttentionGroups:
    """Keeps each episode in one group; a new one gets that with the fewest running requests.

    Of several such groups it gets the one that was given the fewest episodes.

    Example:
        groups = AttentionGroups(2)
        with groups.attending("a") as fields:
            assert fields == {"routed_dp_rank": 0}
    """

    def __init__(self, count: int) -> None:
        """Begin with no episode in any of `count` groups."""
        self._running = [0] * count
        self._given = [0] * count
        self._group: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def attending(self, episode_id: str) -> Iterator[dict[str, Any]]:
        """While a request of an episode runs; yields the fields of its body that say where."""
        if len(self._running) == 1:
            yield {}
            return
        group = self._group_of(episode_id)
        self._running[group] += 1
        try:
            yield {"routed_dp_rank": group}
        finally:
            self._running[group] -= 1

    def _group_of(self, episode_id: str) -> int:
        group = self._group.get(episode_id)
        if group is None:
            # Episodes run nothing between two turns, so how many each group was given counts too.
            group = min(
                range(len(self._running)), key=lambda each: (self._running[each], self._given[each])
            )
            self._given[group] += 1
            self._group[episode_id] = group
        self._group.move_to_end(episode_id)
        if len(self._group) > _EPISODES_MAX:
            self._group.popitem(last=False)
        return group
