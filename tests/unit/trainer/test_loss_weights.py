"""What the losses of an update are divided by, for groups of any sizes."""

from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.tree import Forest, read_tree
from tests.unit.trainer.scene import Sample, merge

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def forest_of(entries: int) -> Forest:
    """A tree of one token of context and one completion of so many tokens."""
    tokens = tuple(range(1, entries + 2))
    behaviour = (-1.0,) * entries
    sample = Sample(tokens=tokens, first_sampled=1, advantage=1.0, behaviour=behaviour)
    return read_tree(merge([sample]))


def weights_of(counts: list[int], loss: Loss) -> list[float]:
    return group_loss_weights([forest_of(count) for count in counts], loss=loss)


@given(COUNTS)
def test_by_step_every_token_has_the_same_part_and_all_of_them_the_whole(counts: list[int]) -> None:
    weights = weights_of(counts, Loss())
    assert len(set(weights)) == 1
    assert fsum(w * n for w, n in zip(weights, counts, strict=True)) == pytest.approx(1)


@given(COUNTS)
def test_by_group_every_group_has_the_same_part_whatever_its_length(counts: list[int]) -> None:
    weights = weights_of(counts, Loss(normalisation="group"))
    parts = [w * n for w, n in zip(weights, counts, strict=True)]
    assert parts == pytest.approx([1 / len(counts)] * len(counts))


@given(COUNTS, COUNTS, st.integers(1, 10_000))
def test_with_group_tokens_a_tokens_part_depends_on_no_length(
    counts: list[int], others: list[int], tokens: int
) -> None:
    """Dr. GRPO: the same number of groups of other lengths has the same weights."""
    loss = Loss(group_tokens=tokens)
    weights = weights_of(counts, loss)
    assert weights == [1 / (len(counts) * tokens)] * len(counts)
    groups = min(len(counts), len(others))
    assert weights_of(counts[:groups], loss) == weights_of(others[:groups], loss)
