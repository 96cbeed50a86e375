"""Trees from their wire form: derived arrays, attention pieces, refusals."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_trainer.core.attention.plan import attention_plan, pieces
from forgemq_trainer.core.tree import Forest, joined, read_tree
from tests.unit.trainer.scene import adversarial_samples, agent_samples, make_sample, merge


def _packed(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def _visible_by_parents(forest: Forest) -> np.ndarray:
    """Which keys each query sees, by walking up the parents: [query, key]."""
    mask = np.eye(forest.token_count, dtype=bool)
    for token, parent in enumerate(forest.parent_N.tolist()):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def _visible_by_pieces(forest: Forest, *, block: int) -> np.ndarray:
    """In how many pieces each pair lies, over all blocks of this size: [query, key]."""
    count = np.zeros((forest.token_count, forest.token_count), dtype=int)
    whole = pieces(forest)
    for start in range(0, forest.token_count, block):
        end = min(start + block, forest.token_count)
        plan = attention_plan(whole, start=start, end=end)
        for first, last in plan.triangles:
            assert start <= first < last <= end
            count[first:last, first:last] += np.tri(last - first, dtype=int)
        for q0, q1, k0, k1 in plan.rectangles:
            assert start <= q0 < q1 <= end
            count[q0:q1, k0:k1] += 1
    return count


def test_a_small_tree_has_these_arrays() -> None:
    """The path 5 6 7 with the branches 8 9 and 4; the heavier child comes first."""
    generator = np.random.default_rng(0)
    samples = [make_sample([5, 6, 7], [8, 9], generator), make_sample([5, 6, 7], [4], generator)]
    forest = read_tree(merge(samples))
    assert forest.tokens_N.tolist() == [5, 6, 7, 8, 9, 4]
    assert forest.parent_N.tolist() == [-1, 0, 1, 2, 3, 2]
    assert forest.position_N.tolist() == [0, 1, 2, 3, 4, 3]
    assert forest.subtree_end_N.tolist() == [6, 6, 6, 5, 5, 6]
    assert forest.entry_token_E.tolist() == [3, 4, 5]
    assert forest.entry_sample_E.tolist() == [0, 0, 1]
    assert forest.attention_pairs == 1 + 2 + 3 + 4 + 5 + 4
    plan = attention_plan(pieces(forest), start=0, end=6)
    assert plan.triangles == ((0, 5), (5, 6))
    assert plan.rectangles == ((5, 6, 0, 3),)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.booleans())
def test_every_visible_pair_is_in_exactly_one_piece(
    seed: int, block: int, is_stripped: bool
) -> None:
    generator = np.random.default_rng(seed)
    forest = joined(
        [
            read_tree(merge(agent_samples(generator, rollouts=2, is_stripped=is_stripped), "g-0")),
            read_tree(merge(adversarial_samples(generator), "g-1")),
        ]
    )
    expected = _visible_by_parents(forest)
    keys = np.arange(forest.token_count)
    interval = (keys[None] <= keys[:, None]) & (keys[:, None] < forest.subtree_end_N[None])
    assert np.array_equal(interval, expected)
    assert np.array_equal(_visible_by_pieces(forest, block=block), expected.astype(int))


def test_a_forest_keeps_its_groups_apart() -> None:
    generator = np.random.default_rng(1)
    trees = [read_tree(merge(adversarial_samples(generator), f"g-{n}")) for n in range(3)]
    forest = joined(trees)
    assert forest.group_ids == ("g-0", "g-1", "g-2")
    assert forest.group_end_G.tolist() == np.cumsum([t.token_count for t in trees]).tolist()
    assert forest.sample_count == sum(tree.sample_count for tree in trees)
    last = forest.entry_group_E == 2
    shift = int(forest.group_end_G[1])
    assert np.array_equal(forest.entry_token_E[last], trees[2].entry_token_E + shift)
    assert np.array_equal(forest.parent_N[shift:] < shift, trees[2].parent_N < 0)
    assert np.array_equal(forest.entry_logprob_E[last], trees[2].entry_logprob_E)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": b"abc"}, "tokens"),
        ({"segment_start": b"", "segment_length": b"", "segment_parent": b""}, "segment_start"),
        ({"segment_length": _packed(3, 2, 0)}, "segment_length"),
        ({"segment_length": _packed(3, 2)}, "segment_length"),
        ({"segment_start": _packed(0, 3, 4)}, "segment_start"),
        ({"segment_length": _packed(3, 2, 2)}, "segment_start"),
        ({"segment_parent": _packed(-1, 0, 7)}, "segment_parent"),
        ({"segment_parent": _packed(1, 0, 0)}, "segment_parent"),
        ({"entry_token": _packed(3, 4, 6)}, "entry_token"),
        ({"entry_token": _packed(0, 4, 5)}, "entry_token"),
        ({"entry_logprob": _packed(1)}, "entry_logprob"),
        ({"entry_logprob": np.array([0, -1, np.nan], "<f4").tobytes()}, "entry_logprob"),
        ({"entry_logprob": np.array([0, -1, 0.5], "<f4").tobytes()}, "entry_logprob"),
        ({"entry_version": _packed(1)}, "entry_version"),
        ({"sample_first_entry": _packed(0, 2)}, "sample_first_entry"),
        ({"sample_first_entry": _packed(0, 4, 3)}, "sample_first_entry"),
        ({"sample_advantage": b""}, "sample_advantage"),
        ({"sample_temperature": np.zeros(2, "<f4").tobytes()}, "sample_temperature"),
        ({"entry_route": b"\0\0"}, "entry_route"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused_by_name(
    changes: dict[str, bytes], field: str
) -> None:
    generator = np.random.default_rng(0)
    samples = [make_sample([5, 6, 7], [8, 9], generator), make_sample([5, 6, 7], [4], generator)]
    tree = merge(samples)
    # The contract refuses wrong lengths, the trainer values that contradict each other.
    with pytest.raises(ValueError, match=rf"\b{field}\b.*:"):
        read_tree(msgspec.structs.replace(tree, **changes))
