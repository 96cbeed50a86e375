"""From where a restart has to read: nothing of a group that is open lies before it.

A mark is a position in every partition. Records of a group are written after its first one, so all
of them lie behind any mark that was taken before the group was entered. The oldest such mark of all
open groups is what a restart needs, whoever wrote the records and however late they arrive.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from forgemq_bus.log import Place

Mark: TypeAlias = Mapping[Place, int]


class Needed:
    """The mark of every open group.

    Example: restored from offset 0 with group a open; a mark at 10: a needs 0. Group b is entered,
    a mark at 20: b needs 10. a retires, a mark at 30: the restart needs 10.

    Args:
        start: Positions that everything known so far was read from.
    """

    def __init__(self, start: Mark) -> None:
        self._newest = start
        self._marks: dict[str, Mark] = {}

    def advance(self, mark: Mark, *, open_groups: Iterable[str]) -> dict[Place, int]:
        """Take the next mark; returns the positions that a restart needs.

        Args:
            mark: Ends of all partitions at some moment after the last mark.
            open_groups: Groups that are open now; every group whose first record lies before the
                mark is among them, or is over.
        """
        self._marks = {group: self._marks.get(group, self._newest) for group in open_groups}
        self._newest = mark
        held = {id(each): each for each in (*self._marks.values(), mark)}.values()
        return {place: min(each[place] for each in held) for place in mark}
