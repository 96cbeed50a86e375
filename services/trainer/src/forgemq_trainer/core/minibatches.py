"""Which groups of a step train in which of its updates: a pure function of the step's record.

MiniMax-M1 (arXiv 2506.13585, section 3.1) took 16 updates on the samples of one step. A minibatch
has whole groups, because the baseline of an advantage is the group's and because a tree is cut
nowhere. Domains are dealt one after the other, so that each update sees all domains in about the
step's shares.

Each update divides by its own entries, as a step of one update does: AdamW does not see the scale
of a gradient, but `optimizer.grad_norm_max` does, and means the same for every number of updates.
"""

from collections.abc import Sequence

from forgemq_contracts.steps import ScheduledGroup


def minibatches(groups: Sequence[ScheduledGroup], *, count: int) -> tuple[tuple[int, ...], ...]:
    """Deal the groups out; every group is in exactly one minibatch.

    The groups of a domain are dealt in rounds, the largest trees first. A round gives each
    minibatch at most one group, and the larger ones to those that have the least. So of two
    minibatches one has at most one group of a domain more than the other, and their tokens differ
    by at most those of the largest tree.

    Args:
        groups: Of the step, in order.
        count: Minibatches, at least 1; as many as groups if there are fewer groups.

    Returns:
        Indices into the groups, ascending in each minibatch; none is empty.
    """
    count = min(count, len(groups))
    tokens = [0] * count
    dealt: list[list[int]] = [[] for _ in range(count)]
    for domain in sorted({group.domain for group in groups}):
        own = [index for index, group in enumerate(groups) if group.domain == domain]
        own.sort(key=lambda index: (-groups[index].tree_tokens, groups[index].group_id))
        for start in range(0, len(own), count):
            least = sorted(range(count), key=lambda number: (tokens[number], number))
            # The last round of a domain may have fewer groups than there are minibatches.
            for index, number in zip(own[start : start + count], least, strict=False):
                dealt[number].append(index)
                tokens[number] += groups[index].tree_tokens
    return tuple(tuple(sorted(minibatch)) for minibatch in dealt)
