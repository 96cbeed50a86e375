"""Computes where a restart must begin to read: at the oldest mark of an open group.

A mark is a position in every partition. It is accepted once every group whose first record lies
before it is known. All records of a group are written after its first one, so every record of a
group that becomes known later lies behind the mark.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from forgemq_bus.log import Place

Mark: TypeAlias = Mapping[Place, int]


class OldestMark:
    """For each open group, the newest mark that was accepted before the group was known.

    Example: restored from offset 0 with group a open. Mark 10 is accepted: a needs 0. Group b is
    requested; mark 20 is accepted: b needs 10. a retires; mark 30 is accepted: a restart needs 10.

    Args:
        start: The positions that everything known so far was read from.
    """

    def __init__(self, start: Mark) -> None:
        self._newest = start
        self._marks: dict[str, Mark] = {}

    def accept(self, mark: Mark, *, open_groups: Iterable[str]) -> dict[Place, int]:
        """Accept the next mark and return the positions that a restart needs.

        Args:
            mark: Ends of all partitions at some moment after the previous mark.
            open_groups: All groups that are open; a group whose first record lies before the mark
                is among them or has retired.
        """
        self._marks = {group: self._marks.get(group, self._newest) for group in open_groups}
        self._newest = mark
        # Many groups share a mark; each different one is compared once.
        held = {id(each): each for each in (*self._marks.values(), mark)}.values()
        return {place: min(each[place] for each in held) for place in mark}
