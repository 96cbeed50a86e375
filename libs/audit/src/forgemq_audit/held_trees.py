"""The facts of compared trees in little memory: a long run trains millions of completions."""

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from msgspec import Struct

from forgemq_contracts.audit import TreeFacts

_ID_BYTES = 16
"""Of a completion's id, 32 hexadecimal digits; as a string it takes 81."""


class HeldTree(Struct, frozen=True):
    """One tree.

    Attributes:
        facts: Without the ids of its completions.
        ids: These, one after the other.
    """

    facts: TreeFacts
    ids: bytes

    @property
    def samples(self) -> int:
        """Completions in the tree."""
        return len(self.ids) // _ID_BYTES


def held(facts: TreeFacts) -> HeldTree:
    """The facts with packed ids."""
    ids = bytes.fromhex("".join(facts.completion_ids))
    return HeldTree(msgspec.structs.replace(facts, completion_ids=()), ids)


def repeated_completions(trees: Sequence[HeldTree]) -> dict[str, int]:
    """How often each completion is in these trees that is there more than once."""
    halves = array("Q")
    for tree in trees:
        halves.extend(array("Q", tree.ids)[::2])
    # Ids are hashes: two that begin with the same half are very likely one.
    repeated = {one for one, following in pairwise(sorted(halves)) if one == following}
    if not repeated:
        return {}
    counts = Counter(
        tree.ids[start : start + _ID_BYTES].hex()
        for tree in trees
        for start, half in zip(
            range(0, len(tree.ids), _ID_BYTES), array("Q", tree.ids)[::2], strict=True
        )
        if half in repeated
    )
    return {completion: count for completion, count in counts.items() if count > 1}
