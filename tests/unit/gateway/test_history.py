"""The tree of message paths and the tree of tokens of one episode."""

import operator
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.arrays import pack_ids, unpack_ids
from forgemq_gateway.core.completion_tokens import common_tokens, tokens_of
from forgemq_gateway.core.digests import EMPTY_PATH, canonical_json, message_digest
from forgemq_gateway.core.forks import fork_reason
from forgemq_gateway.core.history import TAIL_TOKENS, History
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.message_paths import Branch
from forgemq_gateway.core.requests import (
    Echo,
    KeyedMessages,
    RequestMessage,
    Text,
    chat_json,
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


def test_a_reply_is_found_by_its_text_or_by_its_calls_with_its_text_or_none() -> None:
    history = History()
    texted = add_first(history, completion_of(1, context=[1], output=[2], text="hi "), "a")
    called = add_first(history, completion_of(2, context=[3], output=[4], text="x", calls=2), "b")
    calls = [(call.id, call.name, "{ }") for call in called.reply.calls]

    def found(first: str, text: str, calls: Sequence[tuple[str, str, str]] = ()) -> object:
        echo = message_digest("assistant", text, tool_calls=calls)
        match = history.match(history.keys([user(first), echo]))
        return None if match is None else match.completion

    assert found("a", "hi") is texted
    assert found("a", "<think>so what</think>\n\nhi ") is texted
    assert [found("b", text, calls) for text in ("x", "", "<think>hm</think>x")] == [called] * 3
    edits = [(*calls[0][:2], '{"a": 1}'), calls[1]]
    assert [found("b", "x", each) for each in (calls[:1], edits, [])] == [None] * 3
    assert found("b", "y", calls) is None


def test_of_replies_with_the_same_text_the_echoed_reasoning_says_which_is_meant() -> None:
    history = History()
    reply = message_digest("assistant", "yes")
    twins = [
        add_first(
            history,
            completion_of(number, context=[1], output=[number], text="yes", thinking=thought),
            "a",
        )
        for number, thought in enumerate(("first", "second"))
    ]
    children = [
        completion_of(2 + n, parent=twin, shared=2, context=[3], output=[4], text="so")
        for n, twin in enumerate(twins)
    ]
    for child, twin in zip(children, twins, strict=True):
        history.add(child, keys=[user("b")], after=twin.path)
    keys = [user("a"), reply, user("b"), message_digest("assistant", "so")]

    def found(count: int, thought: str) -> object:
        match = history.match(keys[:count], lambda index: Echo(("", thought, "", "")[index]))
        return None if match is None else match.completion

    assert [found(2, thought) for thought in ("first", "second", "", "changed")] == [
        twins[0],
        twins[1],
        twins[1],
        twins[1],
    ]
    assert [found(4, thought) for thought in ("first", "second")] == children


def said(*messages: str) -> list[RequestMessage]:
    """Messages, each a role and a text."""
    parted: list[Any] = [message.split(" ", 1) for message in messages]
    return [RequestMessage(role=role, parts=(Text(text),)) for role, text in parted]


def test_a_match_looks_at_no_message_behind_the_first_that_is_new() -> None:
    history = History()
    add_first(history, completion_of(0, context=[1], output=[2], text="yes"), "a")
    looked: list[str] = []

    class Keys(list[str]):
        def __iter__(self) -> Iterator[str]:
            for key in super().__iter__():
                looked.append(key)
                yield key

    keys = Keys([user("a"), message_digest("assistant", "yes"), *(user(str(n)) for n in range(99))])
    match = history.match(keys)
    assert match is not None
    assert (match.consumed, len(looked)) == (2, 3)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (["system s", "user a", "assistant one", "user b", "assistant two!", "user c"], "edited"),
        (["system s2", "user a", "assistant one", "user b", "assistant two", "user c"], "edited"),
        (["system s", "user a!", "assistant one", "user b", "assistant two"], "edited"),
        (["system s", "user a summary"], "compaction"),
        (["system s", "user a summary", "assistant two"], "compaction"),
        (["system title", "user a"], "side_request"),
        (["user a"], "side_request"),
        (["system s", "user a"], "resampled"),
    ],
)
def test_a_fork_has_a_reason_from_the_requests_before_it(messages: list[str], reason: str) -> None:
    """The policy said `one` and `two`; the longest request has five messages."""

    def keys_of(messages: list[str]) -> list[str]:
        return [message_digest(*message.split(" ", 1)) for message in messages]

    told = ["system s", "user a", "assistant one", "user b", "assistant two", "user c"]
    history = History()
    first = completion_of(1, context=[1], output=[2], text="one")
    history.add(first, keys=keys_of(told[:2]), after=EMPTY_PATH)
    second = completion_of(2, parent=first, shared=2, context=[1], output=[2], text="two")
    history.add(second, keys=keys_of(told[3:4]), after=first.path)
    history.note(Branch(keys_of(told[:5])))
    assert fork_reason(history, keys_of(messages), said(*messages)) == reason


def test_the_first_request_is_no_fork_and_one_beside_it_is_whether_or_not_it_was_answered() -> None:
    history = History()
    keys = [message_digest("system", "s"), user("a")]
    assert fork_reason(history, keys, said("system s", "user a")) is None
    history.note(Branch(keys))
    other = [message_digest("system", "s"), user("b")]
    assert fork_reason(history, other, said("system s", "user b")) == "side_request"
    add_first(history, completion_of(1, context=[1], output=[2], text="x"), "z")
    assert fork_reason(history, other, said("system s", "user b")) == "side_request"


def test_a_whole_number_is_the_same_with_and_without_a_fraction() -> None:
    one, other = ('{"a": [1.0, 2.5, 1e2]}', '{"a":[1,2.5,100]}')
    assert canonical_json(one) == canonical_json(other) != canonical_json('{"a":[1,2,100]}')


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


def test_paths_with_the_same_messages_in_another_order_differ() -> None:
    history = History()
    add_first(history, completion_of(1, context=[1], output=[2], text="r"), "a", "b")
    reply = message_digest("assistant", "r")
    assert history.match([user("b"), user("a"), reply]) is None
    assert history.match([user("a"), user("b"), reply]) is not None
    assert EMPTY_PATH == b""


def test_a_reply_counts_with_its_reasoning_and_its_calls() -> None:
    sizes = []
    for thinking, calls in (("", 0), ("a thought", 0), ("a thought", 2)):
        history = History()
        reply = completion_of(1, context=[1], output=[2], thinking=thinking, calls=calls)
        add_first(history, reply, "a")
        sizes.append(history.held.size_bytes)
    assert [size - sizes[0] for size in sizes] == [0, 9, 9 + 2 * len("{}")]


@pytest.mark.parametrize("seed", range(20))
def test_the_tail_of_a_context_is_its_last_tokens_in_whatever_order_it_is_asked_for(
    seed: int,
) -> None:
    dice, history = random.Random(seed), History()
    wholes: dict[str, list[int]] = {}
    known: list[KnownCompletion] = []
    for number in range(40):
        parent = dice.choice([None, *known[-3:]]) if known else None
        before = wholes[parent.request_id] if parent else []
        # Mostly behind all of its parent; sometimes it leaves the parent within its tokens.
        shared = len(before) if dice.random() < 0.8 else dice.randrange(len(before) + 1)
        context = [dice.randrange(1000) for _ in range(dice.choice([0, 5, 60, 1500]))]
        output = [dice.randrange(1000) for _ in range(dice.choice([1, 30]))]
        completion = completion_of(
            number, parent=parent, shared=shared, context=context, output=output
        )
        wholes[completion.request_id] = [*before[:shared], *context, *output]
        known.append(completion)
        asked = dice.choice([completion, dice.choice(known)])
        whole = wholes[asked.request_id][: asked.context_tokens]
        assert unpack_ids(history.context_tail(asked)) == whole[-TAIL_TOKENS:]


def test_what_a_turn_refers_to_is_read_once_however_many_later_turns_refer_to_it() -> None:
    history = History()
    parent: KnownCompletion | None = None
    for number in range(3):
        said = f"question {number}"
        asked = RequestMessage(role="user", parts=(Text(said),))
        completion = completion_of(
            number, parent=parent, context=[1], output=[2], text=f"answer {number}"
        )
        completion.messages = chat_json([asked])
        parent = add_first(history, completion, said)
    before, whole = (history.messages_until(f"{number:032x}") for number in (1, 2))
    assert before is not None
    assert whole is not None
    texts = ["question 0", "answer 0", "question 1", "answer 1", "question 2", "answer 2"]
    assert [message.parts for message in whole.messages] == [(Text(text),) for text in texts]
    assert all(map(operator.is_, before.messages, whole.messages))
    assert all(map(operator.is_, before.keys, whole.keys))
    assert whole == KeyedMessages.of(whole.messages)
    assert whole.without_first() == KeyedMessages.of(whole.messages[1:])
