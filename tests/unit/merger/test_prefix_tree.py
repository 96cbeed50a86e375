"""The tree against a brute-force trie over full histories, for random and adversarial groups."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_merger.core.prefix_tree import Delta, PrefixTree, build, common_prefix, kept_lengths


def full_sequences(deltas: list[Delta]) -> list[list[int]]:
    sequences: list[list[int]] = []
    for delta in deltas:
        before = sequences[delta.parent][: delta.shared] if delta.parent >= 0 else []
        sequences.append(before + delta.tokens.tolist())
    return sequences


def delta(parent: int, shared: int, tokens: list[int]) -> Delta:
    return Delta(parent, shared, np.array(tokens, np.int32))


def layout(tree: PrefixTree) -> tuple[list[int], list[int], list[int]]:
    """Parent, depth and segment of every token, from the segment table alone."""
    parents, depths, segments = [], [], []
    rows = zip(
        tree.segment_start.tolist(),
        tree.segment_length.tolist(),
        tree.segment_parent.tolist(),
        strict=True,
    )
    for segment, (start, length, parent) in enumerate(rows):
        assert start == len(parents), "segments lie one after the other"
        assert length >= 1
        assert parent < segment, "pre-order"
        above = (
            -1 if parent < 0 else int(tree.segment_start[parent] + tree.segment_length[parent]) - 1
        )
        for index in range(start, start + length):
            parents.append(above if index == start else index - 1)
            depths.append(0 if parents[-1] < 0 else depths[parents[-1]] + 1)
            segments.append(segment)
    return parents, depths, segments


def path(tree: PrefixTree, leaf: int) -> list[int]:
    parents, _, _ = layout(tree)
    found = []
    while leaf >= 0:
        found.append(leaf)
        leaf = parents[leaf]
    return found[::-1]


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Delta], list[bool]]:
    """Appends, cuts, forks, duplicates and new roots over few token ids, so that much is shared."""
    tokens = st.lists(st.integers(0, 2), max_size=6)
    deltas: list[Delta] = []
    for index in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, index - 1))
        length = deltas[parent].length if parent >= 0 else 0
        shared = draw(st.sampled_from([0, length]) | st.integers(0, length))
        deltas.append(delta(parent, shared, draw(tokens)))
    wanted = [draw(st.booleans()) for _ in deltas]
    return deltas, wanted


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(groups())
def test_the_tree_holds_every_prefix_of_the_wanted_sequences_once_and_nothing_else(group):
    deltas, wanted = group
    sequences = [s for s, w in zip(full_sequences(deltas), wanted, strict=True) if w]
    prefixes = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    tree = build(deltas, kept=kept_lengths(deltas, wanted=wanted))
    parents, depths, _ = layout(tree)
    spelled: list[tuple[int, ...]] = []
    for index, parent in enumerate(parents):
        before = spelled[parent] if parent >= 0 else ()
        spelled.append((*before, int(tree.tokens[index])))
    assert len(spelled) == len(prefixes)
    assert set(spelled) == prefixes
    assert tree.attention_pairs == sum(depth + 1 for depth in depths)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(groups())
def test_every_wanted_sequence_is_read_back_token_by_token(group):
    deltas, wanted = group
    tree = build(deltas, kept=kept_lengths(deltas, wanted=wanted))
    for index, sequence in enumerate(full_sequences(deltas)):
        if not wanted[index] or not sequence:
            continue
        on_path = path(tree, tree.leaf(index, len(sequence)))
        assert tree.tokens[on_path].tolist() == sequence
        first = len(sequence) // 2
        ranges = tree.ranges(index, first, len(sequence))
        assert [t for start, stop in ranges for t in range(start, stop)] == on_path[first:]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(groups(), st.randoms(use_true_random=False))
def test_equal_sequences_give_an_equal_tree_whatever_their_order_and_parents(group, shuffle):
    deltas, wanted = group
    tree = build(deltas, kept=kept_lengths(deltas, wanted=wanted))
    sequences = [s for s, w in zip(full_sequences(deltas), wanted, strict=True) if w]
    shuffle.shuffle(sequences)
    flat = [delta(-1, 0, sequence) for sequence in sequences]
    other = build(flat, kept=[each.length for each in flat])
    for name in ("tokens", "segment_start", "segment_length", "segment_parent"):
        assert getattr(tree, name).tolist() == getattr(other, name).tolist(), name
    assert tree.attention_pairs == other.attention_pairs


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(groups())
def test_segments_are_maximal_and_heavier_subtrees_come_first(group):
    deltas, wanted = group
    tree = build(deltas, kept=kept_lengths(deltas, wanted=wanted))
    children: dict[int, list[int]] = {}
    for segment, parent in enumerate(tree.segment_parent.tolist()):
        children.setdefault(parent, []).append(segment)
    below = tree.segment_length.tolist()
    for segment in range(len(below) - 1, -1, -1):
        parent = int(tree.segment_parent[segment])
        if parent >= 0:
            below[parent] += below[segment]
    for parent, found in children.items():
        assert parent < 0 or len(found) >= 2, "a segment ends only at a branch"
        sizes = [below[child] for child in found]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(groups())
def test_a_subtree_is_the_interval_from_its_token_to_its_end(group):
    deltas, wanted = group
    tree = build(deltas, kept=kept_lengths(deltas, wanted=wanted))
    parents, _, _ = layout(tree)
    for index, each in enumerate(deltas):
        if not wanted[index] or each.length == 0:
            continue
        leaf = tree.leaf(index, each.length)
        inside = {leaf}
        for token in range(leaf + 1, len(parents)):
            if parents[token] in inside:
                inside.add(token)
        assert sorted(inside) == list(range(leaf, tree.subtree_end(index, each.length)))


def test_one_sequence_is_one_segment_however_many_turns_appended_to_it():
    deltas = [delta(-1, 0, [5, 6])]
    for turn in range(50):
        deltas.append(delta(turn, deltas[turn].length, [7, turn]))
    tree = build(deltas, kept=[each.length for each in deltas])
    assert tree.segment_length.tolist() == [102]
    assert tree.attention_pairs == 102 * 103 // 2


def test_a_cut_hangs_where_the_parent_was_left():
    deltas = [delta(-1, 0, [1, 2, 3, 4, 5, 6]), delta(0, 2, [9, 9])]
    tree = build(deltas, kept=[6, 4])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6, 9, 9]
    assert tree.segment_length.tolist() == [2, 4, 2]
    assert tree.segment_parent.tolist() == [-1, 0, 0]


def test_a_cut_that_continues_as_the_parent_did_shares_those_tokens():
    deltas = [delta(-1, 0, [1, 2, 3, 4]), delta(0, 1, [2, 3, 9])]
    tree = build(deltas, kept=[4, 4])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 9]


def test_a_prefix_of_another_and_an_identical_copy_cost_nothing():
    deltas = [delta(-1, 0, [1, 2, 3]), delta(-1, 0, [1, 2]), delta(-1, 0, [1, 2, 3])]
    tree = build(deltas, kept=[3, 2, 3])
    assert tree.tokens.tolist() == [1, 2, 3]
    assert [tree.leaf(0, 3), tree.leaf(1, 2), tree.leaf(2, 3)] == [2, 1, 2]


def test_ancestors_keep_only_what_their_descendants_need():
    deltas = [delta(-1, 0, [1, 2, 3, 4]), delta(0, 3, [7, 8, 9]), delta(1, 4, [5])]
    assert kept_lengths(deltas, wanted=[False, False, True]) == [3, 4, 5]
    tree = build(deltas, kept=[3, 4, 5])
    assert tree.tokens.tolist() == [1, 2, 3, 7, 5]


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [2, 2], 0), ([1, 2, 3], [1, 2, 4], 2)],
)
def test_common_prefix_counts_leading_equal_tokens(left, right, length):
    assert common_prefix(np.array(left, np.int32), np.array(right, np.int32)) == length


def test_cost_follows_the_deltas_and_not_the_histories():
    """16 rollouts of 40 turns: 12 million history tokens, a few hundred thousand in deltas."""
    chooser = random.Random(0)
    prompt = [chooser.randrange(30_000) for _ in range(8192)]
    deltas: list[Delta] = []
    for _ in range(16):
        deltas.append(delta(-1, 0, prompt + [chooser.randrange(30_000) for _ in range(200)]))
        for _ in range(39):
            tokens = [chooser.randrange(30_000) for _ in range(500)]
            deltas.append(delta(len(deltas) - 1, deltas[-1].length, tokens))
    history_tokens = sum(each.length for each in deltas)
    started = time.process_time()
    tree = build(deltas, kept=[each.length for each in deltas])
    rate = history_tokens / (time.process_time() - started)
    assert len(tree.tokens) == 8192 + 16 * (200 + 39 * 500)
    assert rate > 20e6, f"{rate:.3g} history tokens a second"
