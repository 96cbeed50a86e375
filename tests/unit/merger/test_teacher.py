"""A teacher's log-probabilities reach the tree for all entries of a group, or the group fails."""

from forgemq_contracts.arrays import pack_floats, unpack_floats
from forgemq_contracts.trees import MergedTree
from forgemq_merger.core.merger import MergerCore
from tests.unit.merger.records import feed, finished, name, only_summary, scored


def _trees(outputs):
    return [output.record for output in outputs if isinstance(output.record, MergedTree)]


def test_entries_have_what_the_teacher_said_of_their_tokens():
    records = [
        finished(0, None, 0, [1], [2, 3], teacher_logprobs=pack_floats([-0.25, -0.5])),
        finished(1, 0, 3, [4], [5], teacher_logprobs=pack_floats([-4.0])),
    ]
    [tree] = _trees(feed(MergerCore(4), *records, scored(1, 0)))
    said = dict(zip(tree.sample_ids, ([-4.0], [-0.25, -0.5]), strict=True))
    assert list(said) == [name(1), name(0)]
    assert list(unpack_floats(tree.entry_teacher_logprob)) == [-4.0, -0.25, -0.5]


def test_a_completion_that_does_not_train_needs_no_word_of_the_teacher():
    records = [
        finished(0, None, 0, [1], [2], teacher_logprobs=pack_floats([-1.0])),
        finished(1, None, 0, [1], [3], support="greedy"),
    ]
    [tree] = _trees(feed(MergerCore(4), *records, scored(0, 1)))
    assert list(unpack_floats(tree.entry_teacher_logprob)) == [-1.0]


def test_a_group_of_which_the_teacher_knows_a_part_fails_and_says_which():
    records = [
        finished(0, None, 0, [1], [2], teacher_logprobs=pack_floats([-1.0])),
        finished(1, None, 0, [1], [3]),
    ]
    summary = only_summary(feed(MergerCore(4), *records, scored(0, 1)))
    assert summary.not_trainable == "failed"
    assert summary.detail == (
        f"completion {name(1)}: no log-probabilities of the teacher, as 1 of 2 that train"
    )


def test_without_a_teacher_a_tree_has_none():
    [tree] = _trees(feed(MergerCore(4), finished(0, None, 0, [1], [2]), scored(0)))
    assert tree.entry_teacher_logprob == b""


def test_a_group_of_which_the_teacher_of_the_run_knows_nothing_fails_before_its_step():
    records = [finished(0, None, 0, [1], [2]), finished(1, None, 0, [1], [3])]
    summary = only_summary(feed(MergerCore(4, has_teacher=True), *records, scored(0, 1)))
    assert summary.not_trainable == "failed"
    assert summary.detail == (
        f"completion {name(0)}: no log-probabilities of the teacher, as 2 of 2 that train"
    )
