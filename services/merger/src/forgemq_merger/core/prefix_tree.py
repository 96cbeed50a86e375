"""The prefix tree of a group's completions, built from deltas and never from full histories.

A completion is the first `shared` tokens of its parent, followed by its own `tokens`. The parent
pointer says where it is attached, so histories are not compared. Tokens are compared only if
another continuation is attached at the same token already, and only up to the first difference.
Building costs O(sum of the deltas), however long the histories are.

The layout is depth-first with the heaviest child first (most tokens below it), so that the trunk
of the tree is contiguous and its attention is few large pieces. Source: Forge (arXiv 2605.26494),
prefix-tree merging.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Delta:
    """One completion as an addition to its parent.

    Attributes:
        parent: Index of an earlier delta, or -1 if there is no parent; `shared` is 0 then.
        shared: Leading tokens of the parent's whole sequence that this one begins with.
        tokens: What follows them.
    """

    parent: int
    shared: int
    tokens: Int32s

    @property
    def length(self) -> int:
        """Number of tokens of the whole sequence."""
        return self.shared + len(self.tokens)


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens at depths [start, end).

    A split keeps this object as the lower half, so that pointers to where a sequence ends stay
    valid.
    """

    parent: "_Node | None"
    start: int
    tokens: Int32s
    children: "dict[int, _Node]" = field(default_factory=dict)
    below: int = 0
    layout: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Unique tokens in layout order, the segment table, and where each sequence lies in it."""

    tokens: Int32s
    segment_start: Int32s
    segment_length: Int32s
    segment_parent: Int32s
    attention_pairs: int
    ends: "tuple[_Node, ...]"

    def leaf(self, sequence: int, length: int) -> int:
        """Layout index of the last of the first `length` tokens of a sequence, `length` >= 1."""
        node = _node_at(self.ends[sequence], length)
        return node.layout + length - 1 - node.start

    def subtree_end(self, sequence: int, length: int) -> int:
        """Layout index after the last token below that leaf."""
        node = _node_at(self.ends[sequence], length)
        return node.layout + node.below

    def ranges(self, sequence: int, first: int, last: int) -> list[tuple[int, int]]:
        """Layout ranges [start, stop) of a sequence's tokens [first, last), in token order."""
        found = []
        node = self.ends[sequence]
        while last > first:
            node = _node_at(node, last)
            low = max(first, node.start)
            found.append((node.layout + low - node.start, node.layout + last - node.start))
            last = low
        return found[::-1]


def build(deltas: Sequence[Delta], *, kept: Sequence[int]) -> PrefixTree:
    """The tree of the first `kept[i]` tokens of every sequence; 0 leaves a sequence out.

    Equal sets of sequences give equal trees, in whatever order and with whatever parents they
    come.

    Args:
        deltas: Parents before children.
        kept: At most the sequence's length, at least what its kept children share with it.
    """
    root = _Node(None, 0, np.empty(0, np.int32))
    ends: list[_Node] = []
    for delta, length in zip(deltas, kept, strict=True):
        start = ends[delta.parent] if delta.parent >= 0 else root
        if length <= delta.shared:
            ends.append(start)
            continue
        node = _node_at(start, delta.shared)
        ends.append(_insert(node, delta.shared, delta.tokens[: length - delta.shared]))
    return _lay_out(root, tuple(ends))


def kept_lengths(deltas: Sequence[Delta], *, wanted: Sequence[bool]) -> list[int]:
    """Leading tokens to keep of each sequence: a wanted one whole, an ancestor as far as shared."""
    kept = [
        delta.length if is_wanted else 0 for delta, is_wanted in zip(deltas, wanted, strict=True)
    ]
    # Children before their parents: what a parent must keep depends on what its children keep.
    for index in range(len(deltas) - 1, -1, -1):
        delta = deltas[index]
        if delta.parent >= 0:
            kept[delta.parent] = max(kept[delta.parent], min(delta.shared, kept[index]))
    return kept


def common_prefix(left: Int32s, right: Int32s) -> int:
    """Number of leading tokens that are equal."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def _node_at(node: _Node, depth: int) -> _Node:
    """The node, on the path from the root to `node`, that holds the token before `depth`."""
    while node.start >= depth and node.parent is not None:
        node = node.parent
    return node


def _insert(node: _Node, depth: int, tokens: Int32s) -> _Node:
    """Walk down from `depth` in `node` while tokens agree; attach what is left as a new node."""
    while len(tokens):
        if depth < node.end:
            shared = common_prefix(node.tokens[depth - node.start :], tokens)
            depth, tokens = depth + shared, tokens[shared:]
            if len(tokens) and depth < node.end:
                node = _split(node, depth)
            continue
        child = node.children.get(int(tokens[0]))
        if child is None:
            child = _Node(node, depth, tokens)
            node.children[int(tokens[0])] = child
            return child
        node = child
    return node


def _split(lower: _Node, depth: int) -> _Node:
    """Cut a node at a depth inside it; returns the new upper half."""
    assert lower.parent is not None
    size = depth - lower.start
    upper = _Node(lower.parent, lower.start, lower.tokens[:size])
    lower.parent.children[int(upper.tokens[0])] = upper
    lower.parent, lower.start, lower.tokens = upper, depth, lower.tokens[size:]
    upper.children[int(lower.tokens[0])] = lower
    return upper


def _lay_out(root: _Node, ends: tuple[_Node, ...]) -> PrefixTree:
    _weigh(root)
    pieces: list[Int32s] = []
    starts: list[int] = []
    lengths: list[int] = []
    parents: list[int] = []
    position = pairs = 0
    waiting = [(child, -1) for child in _light_to_heavy(root)]
    while waiting:
        node, segment = waiting.pop()
        above = node.parent
        size = len(node.tokens)
        # A segment ends at a branch only: an only child continues its parent's segment, however
        # many nodes earlier splits made of it.
        if above is root or above is None or len(above.children) > 1:
            starts.append(position)
            lengths.append(0)
            parents.append(segment)
            segment = len(starts) - 1
        lengths[segment] += size
        # A token at depth d (from 0) attends to d + 1 tokens: sum of start + 1 to end.
        pairs += (node.end * (node.end + 1) - node.start * (node.start + 1)) // 2
        node.layout = position
        position += size
        pieces.append(node.tokens)
        waiting.extend((child, segment) for child in _light_to_heavy(node))
    return PrefixTree(
        tokens=np.concatenate(pieces) if pieces else np.empty(0, np.int32),
        segment_start=np.array(starts, np.int32),
        segment_length=np.array(lengths, np.int32),
        segment_parent=np.array(parents, np.int32),
        attention_pairs=pairs,
        ends=ends,
    )


def _weigh(root: _Node) -> None:
    """Set `below` of every node: its own tokens and all tokens under it."""
    # A stack instead of recursion: a chain of a thousand turns is a thousand levels deep.
    order: list[_Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting.extend(node.children.values())
    for node in reversed(order):
        node.below = len(node.tokens) + sum(child.below for child in node.children.values())


def _light_to_heavy(node: _Node) -> list[_Node]:
    """Children, the heaviest last because a stack pops it first; ties by their first token."""
    if len(node.children) < 2:
        return list(node.children.values())
    return sorted(node.children.values(), key=lambda child: (child.below, -int(child.tokens[0])))
