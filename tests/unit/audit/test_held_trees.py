"""Trees that the audit holds name each completion that is in them more than once."""

from forgemq_audit.held_trees import held, repeated_completions
from forgemq_contracts.audit import TreeFacts

SHARED_HALF = "0123456789abcdef"


def tree(group: int, *completions: str) -> TreeFacts:
    return TreeFacts(
        group_id=f"g-{group:016x}", sha256=f"{group:064x}", completion_ids=completions, entries=1
    )


def test_a_completion_in_two_trees_or_twice_in_one_is_counted():
    once, twice, thrice = (f"{number:032x}" for number in (1, 2, 3))
    trees = [
        held(tree(1, once, twice, thrice)),
        held(tree(2, thrice, thrice)),
        held(tree(3, twice)),
    ]
    assert repeated_completions(trees) == {twice: 2, thrice: 3}
    assert [each.samples for each in trees] == [3, 2, 1]


def test_completions_whose_ids_begin_alike_are_different_ones():
    first, second = (f"{SHARED_HALF}{number:016x}" for number in (1, 2))
    assert repeated_completions([held(tree(1, first)), held(tree(2, second))]) == {}
    assert repeated_completions([]) == {}


def test_a_held_tree_takes_sixteen_bytes_for_each_completion():
    one = held(tree(1, *(f"{number:032x}" for number in range(40))))
    assert (len(one.ids), one.facts.completion_ids) == (40 * 16, ())
