"""Which lanes are to be in the one process group of all lanes; time comes in as seconds."""

from collections.abc import Collection
from typing import NamedTuple

SETTLE_S = 10.0
"""The others wait this long for a lane that falls behind with weights: most load within it, and
each group that is formed without one is followed by another with it. One that is behind for longer,
version after version, is not waited for again."""

AWAY_S = 60.0
"""A lane whose engine did not join is left out for this time at first, then for twice as long:
while a group is formed, the engines of the other lanes stand still."""

AWAY_S_MAX = 3600.0


class GroupMember(NamedTuple):
    """A lane in a group: its epoch, and its engine's processes, each of which has a rank."""

    lane: int
    epoch: int
    ranks: int


class SharedMembers:
    """Decides when a group is to be formed, and of which lanes.

    Example: lanes 0 and 1 are in a group, lane 2 comes and loads the durable copy. Once it serves
    the newest version, `wanted` gives all three. Its engine does not join: `note_absent`, and for
    60 s `wanted` gives lanes 0 and 1.
    """

    def __init__(self) -> None:
        self._late_since_s: dict[int, float] = {}
        self._away: dict[GroupMember, tuple[float, float]] = {}

    def wanted(
        self,
        ready: Collection[GroupMember],
        *,
        late: Collection[int],
        formed: Collection[GroupMember],
        at_s: float,
    ) -> tuple[GroupMember, ...]:
        """The members of the group to form now, by lane; () if none is to be formed.

        Args:
            ready: Live lanes that serve the newest version.
            late: Live lanes that serve an older one.
            formed: Members of the present group; none if it is broken.
            at_s: Seconds of a clock that never goes back.
        """
        self._late_since_s = {lane: self._late_since_s.get(lane, at_s) for lane in late}
        if any(at_s - since_s < SETTLE_S for since_s in self._late_since_s.values()):
            return ()
        members = sorted(each for each in ready if not self._is_away(each, at_s))
        return () if members == sorted(formed) else tuple(members)

    def note_absent(self, members: Collection[GroupMember], *, at_s: float) -> None:
        """Note whose engines did not join the group that was to be formed."""
        for member in members:
            _, before_s = self._away.get(member, (0.0, AWAY_S / 2))
            away_s = min(2 * before_s, AWAY_S_MAX)
            self._away[member] = (at_s + away_s, away_s)

    def note_formed(self, members: Collection[GroupMember]) -> None:
        """Note who has joined a group."""
        for member in members:
            self._away.pop(member, None)

    def _is_away(self, member: GroupMember, at_s: float) -> bool:
        return member in self._away and at_s < self._away[member][0]
