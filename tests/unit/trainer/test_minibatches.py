"""A step's groups are dealt to minibatches: each once, by tokens, with all domains in each."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.steps import ScheduledGroup
from forgemq_trainer.core.minibatches import minibatches


def _group(number: int, domain: str, tokens: int) -> ScheduledGroup:
    return ScheduledGroup(
        group_id=f"{domain}-{number}",
        domain=domain,
        queue_index=number,
        partition=0,
        tree_sha256="0" * 64,
        tree_tokens=tokens,
        loss_tokens=1,
        attention_pairs=1,
        version_min=0,
        staleness=0,
    )


GROUPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 10_000)), min_size=1, max_size=40
).map(lambda drawn: [_group(n, domain, tokens) for n, (domain, tokens) in enumerate(drawn)])


@given(GROUPS, st.integers(1, 50))
def test_every_group_is_in_one_minibatch_and_none_is_empty(
    groups: list[ScheduledGroup], count: int
) -> None:
    dealt = minibatches(groups, count=count)
    assert len(dealt) == min(count, len(groups))
    assert all(dealt)
    assert sorted(index for part in dealt for index in part) == list(range(len(groups)))


@given(GROUPS, st.integers(1, 50))
def test_tokens_differ_by_at_most_the_largest_tree_and_domains_by_at_most_one_group(
    groups: list[ScheduledGroup], count: int
) -> None:
    dealt = minibatches(groups, count=count)
    tokens = [sum(groups[index].tree_tokens for index in part) for part in dealt]
    assert max(tokens) - min(tokens) <= max(group.tree_tokens for group in groups)
    domains = [Counter(groups[index].domain for index in part) for part in dealt]
    for one, other in combinations(domains, 2):
        assert all(abs(one[domain] - other[domain]) <= 1 for domain in "abc")


@pytest.mark.slow
@given(GROUPS, st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_order_of_the_groups_has_no_part_in_the_split(
    groups: list[ScheduledGroup], count: int, random: object
) -> None:
    def named(ordered: list[ScheduledGroup]) -> set[frozenset[str]]:
        dealt = minibatches(ordered, count=count)
        return {frozenset(ordered[index].group_id for index in part) for part in dealt}

    mixed = list(groups)
    random.shuffle(mixed)  # type: ignore[attr-defined]  # Hypothesis' own Random
    assert named(mixed) == named(groups)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, ((0, 1, 2, 3, 4),)), (2, ((0, 3, 4), (1, 2))), (9, ((0,), (1,), (2,), (3,), (4,)))],
)
def test_the_larger_trees_go_to_the_minibatch_with_the_fewest_tokens(
    count: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    """90, 70, 50, 20, 10: 90 + 20 + 10 and 70 + 50."""
    sizes = (90, 70, 50, 20, 10)
    groups = [_group(number, "a", tokens) for number, tokens in enumerate(sizes)]
    assert minibatches(groups, count=count) == expected


def test_a_step_without_groups_has_no_minibatch() -> None:
    assert minibatches([], count=4) == ()
