"""The tree of message paths and the tree of tokens of one episode."""

from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.arrays import pack_ids, unpack_ids
from forgemq_gateway.core.digests import EMPTY_PATH, message_digest
from forgemq_gateway.core.history import (
    History,
    KnownCompletion,
    cached_tokens,
    common_tokens,
    tokens_of,
)
from tests.unit.gateway.completions import add_first, completion_of, user

tokens = st.lists(st.integers(0, 3), max_size=30)


@given(left=tokens, right=tokens)
def test_common_tokens_is_the_longest_common_prefix(left: list[int], right: list[int]) -> None:
    shared = common_tokens(pack_ids(left), pack_ids(right))
    assert left[:shared] == right[:shared]
    assert shared == min(len(left), len(right)) or left[shared] != right[shared]


@given(
    contexts=st.lists(
        st.tuples(tokens, st.lists(st.integers(0, 3), min_size=1, max_size=5)),
        min_size=1,
        max_size=8,
    ),
    probe=tokens,
)
def test_a_fork_takes_the_parent_with_the_longest_shared_prefix(
    contexts: list[tuple[list[int], list[int]]], probe: list[int]
) -> None:
    """Against a search over all completions; their tokens come back from parents and deltas."""
    history, whole = History(), list[tuple[KnownCompletion, list[int]]]()
    for number, (context, output) in enumerate(contexts):
        parent, shared = history.nearest(pack_ids(context))
        completion = completion_of(
            number, parent=parent, shared=shared, context=context[shared:], output=output
        )
        add_first(history, completion, str(number))
        whole.append((completion, [*context, *output]))
    for completion, ids in whole:
        assert unpack_ids(tokens_of(completion)) == ids
        assert unpack_ids(tokens_of(completion, count=len(ids) - 1, skip=2)) == ids[2:-1]
    parent, shared = history.nearest(pack_ids(probe))
    best = max(common_tokens(pack_ids(ids), pack_ids(probe)) for _, ids in whole)
    assert shared == best
    assert (parent is None) == (best == 0)
    if parent is not None:
        assert unpack_ids(tokens_of(parent, count=shared)) == probe[:shared]


def test_a_reply_is_found_by_its_text_or_by_its_calls_with_any_text() -> None:
    history = History()
    texted = add_first(history, completion_of(1, context=[1], output=[2], text="hi "), "a")
    called = add_first(history, completion_of(2, context=[3], output=[4], text="x", calls=2), "b")
    by_text = history.keys([user("a"), message_digest("assistant", "hi")], ["", ""])
    lost = message_digest("assistant", "")
    by_call = history.keys([user("b"), lost], ["", called.reply.calls[0].id])
    found = history.match(by_text), history.match(by_call)
    assert found[0] is not None
    assert found[1] is not None
    assert [match.completion for match in found if match] == [texted, called]
    assert history.match(history.keys([user("b"), lost], ["", "call_of_nobody"])) is None


def test_the_deepest_completion_on_the_path_is_matched_and_its_tail_is_new() -> None:
    history = History()
    first = add_first(history, completion_of(1, context=[1], output=[2], text="one"), "a")
    second = completion_of(2, parent=first, shared=2, context=[3], output=[4], text="two")
    history.add(second, keys=[user("b")], after=first.path)
    path = [user("a"), message_digest("assistant", "one"), user("b")]
    whole = [*path, message_digest("assistant", "two"), user("c"), user("d")]
    match = history.match(whole)
    assert match is not None
    assert (match.completion, match.consumed) == (second, 4)
    match = history.match([*path[:2], user("other")])
    assert match is not None
    assert (match.completion, match.consumed) == (first, 2)
    assert history.match([user("z"), *whole]) is None


def test_blocks_nulls_roles_and_argument_spacing_do_not_change_a_digest() -> None:
    assert message_digest("developer", "x") == message_digest("system", "x")
    assert message_digest("assistant", " x\n") == message_digest("assistant", "x")
    assert message_digest("user", " x") != message_digest("user", "x")
    one = message_digest("assistant", "", tool_calls=[("i", "f", '{"a": 1, "b": [2]}')])
    assert one == message_digest("assistant", "", tool_calls=[("i", "f", '{"b":[2],"a":1}')])
    assert one != message_digest("assistant", "", tool_calls=[("i", "f", '{"a": 1, "b": [3]}')])
    assert message_digest("tool", "x", tool_call_id="1") != message_digest("tool", "x")


def test_a_lane_has_cached_what_it_computed_of_the_ancestors_under_this_epoch() -> None:
    root = completion_of(1, context=[1, 1, 1], output=[2], lane=0)
    child = completion_of(2, parent=root, shared=4, context=[3], output=[4, 4], lane=1)
    assert cached_tokens(child, shared=7, lane=1, epoch=1) == 7
    assert cached_tokens(child, shared=7, lane=0, epoch=1) == 4
    assert cached_tokens(child, shared=2, lane=0, epoch=1) == 2
    assert cached_tokens(child, shared=7, lane=0, epoch=2) == 0
    assert cached_tokens(None, shared=0, lane=0, epoch=1) == 0


def test_paths_with_the_same_messages_in_another_order_differ() -> None:
    history = History()
    add_first(history, completion_of(1, context=[1], output=[2], text="r"), "a", "b")
    reply = message_digest("assistant", "r")
    assert history.match([user("b"), user("a"), reply]) is None
    assert history.match([user("a"), user("b"), reply]) is not None
    assert EMPTY_PATH == b""
