"""Prefix trees of planned groups in their wire form; token ids are numbers without a meaning."""

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.trees import MergedTree
from forgemq_launcher.plan.episodes import EpisodeShape, GroupTokens, usual_group

VOCABULARY = 1024
"""Token ids are below it; the bytes of a tree do not depend on them."""


def largest_tree(group: GroupTokens) -> MergedTree:
    """The tree of a group in which every token that no other episode has was sampled."""
    turns = [(0, group.own)]
    return _tree(group, turns)


def usual_tree(shape: EpisodeShape, *, episodes: int, routes: int = 0) -> MergedTree:
    """The tree of a usual group.

    Args:
        shape: Of its episodes.
        episodes: Of the group.
        routes: Numbers of experts that each entry records; 0 for a dense model.
    """
    each = shape.sampled + shape.observed
    turns = [(turn * each, turn * each + shape.sampled) for turn in range(shape.turns)]
    return _tree(usual_group(shape, episodes=episodes), turns, routes=routes)


def _tree(group: GroupTokens, turns: list[tuple[int, int]], *, routes: int = 0) -> MergedTree:
    """The tree in which each episode sampled these ranges of its own tokens."""
    # A root has nothing before it that it could be sampled from.
    turns = [(max(start, 1 - group.shared), end) for start, end in turns]
    starts = [group.shared + index * group.own for index in range(group.episodes)]
    segments = [(0, group.shared, -1)] if group.shared else []
    segments += [(start, group.own, 0 if group.shared else -1) for start in starts]
    samples = [(start, episode, turn) for episode, start in enumerate(starts) for turn in turns]
    entries = [
        token for start, _, turn in samples for token in range(start + turn[0], start + turn[1])
    ]
    ends = [start + turn[1] - 1 for start, _, turn in samples]
    firsts = [0]
    for _, _, turn in samples:
        firsts.append(firsts[-1] + turn[1] - turn[0])
    count = len(samples)
    return MergedTree(
        group_id=f"{0:032x}",
        domain="planned",
        tokens=pack_ids(index % VOCABULARY for index in range(group.tokens)),
        segment_start=pack_ids(start for start, _, _ in segments),
        segment_length=pack_ids(length for _, length, _ in segments),
        segment_parent=pack_ids(parent for _, _, parent in segments),
        entry_token=pack_ids(entries),
        entry_logprob=pack_floats([-1.0] * len(entries)),
        entry_version=pack_ids([1] * len(entries)),
        sample_first_entry=pack_ids(firsts),
        sample_advantage=pack_floats([0.5] * count),
        sample_temperature=pack_floats([1.0] * count),
        sample_leaf=pack_ids(ends),
        sample_episode=pack_ids(episode for _, episode, _ in samples),
        sample_turn=pack_ids(turns.index(turn) for _, _, turn in samples),
        sample_ids=tuple(f"{index:032x}" for index in range(count)),
        lineage=1,
        entry_route=bytes(2 * routes * len(entries)),
    )
