"""Large requests leave the interpreter to the event loop."""

import gc
import json
import sys
import threading
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.history import History
from forgemq_gateway.core.requests import MESSAGES_MAX, PARTS_MAX, Request, size_of, work_size
from forgemq_gateway.large_work import INLINE_SIZE_MAX, LargeWork, favour_event_loop
from forgemq_gateway.protocols import PROTOCOLS
from forgemq_gateway.protocols.json_body import items_in

USER = {"role": "user", "content": "hello"}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
PROTOCOL_OF = {protocol.path: protocol for protocol in PROTOCOLS}

# A block, a tool and an item of every protocol.
ITEM = '{"type":"text","name":"f","function":{"name":"f"}}'


def chat(messages: list[Any]) -> Request:
    body = json.dumps({"messages": messages}).encode()
    return PROTOCOL_OF["/v1/chat/completions"].read(body, History())


def chat_of(body: bytes, history: History) -> Request:
    return PROTOCOL_OF["/v1/chat/completions"].read(body, history)


def read_messages(messages: list[Any]) -> Request:
    return PROTOCOL_OF["/v1/messages"].read(json.dumps({"messages": messages}).encode(), History())


@pytest.mark.slow
def test_modules_are_left_out_of_collections_and_threads_switch_within_a_millisecond() -> None:
    before_s, collected_after = sys.getswitchinterval(), gc.get_threshold()
    gc.unfreeze()  # The test session's own modules, which are left frozen afterwards.
    try:
        favour_event_loop()
        assert gc.get_freeze_count() > 10_000
        assert round(sys.getswitchinterval(), 6) == 0.0002
        assert gc.get_threshold() == (5_000, 10, 10)
    finally:
        gc.freeze()
        gc.set_threshold(*collected_after)
        sys.setswitchinterval(before_s)


def test_a_message_counts_as_work_however_short_it_is() -> None:
    request = chat([USER] * 100)
    assert size_of(request.messages) < INLINE_SIZE_MAX < work_size(request.messages)


async def test_only_large_work_goes_to_a_thread() -> None:
    work = LargeWork("test")
    here = threading.get_ident()
    assert await work.run(threading.get_ident, size=INLINE_SIZE_MAX) == here
    assert await work.run(threading.get_ident, size=INLINE_SIZE_MAX + 1) != here


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", {"stop": ["a"] * 60_000}),
        ("/v1/chat/completions", {"logit_bias": {str(n): 1 for n in range(30_000)}}),
        ("/v1/completions", {"stop": ["a"] * 60_000}),
        ("/v1/messages", {"stop_sequences": ["a"] * 60_000}),
        ("/v1/responses", {"tool_choice": {str(n): 1 for n in range(30_000)}}),
    ],
)
def test_fields_beside_the_messages_are_refused_by_name_if_they_are_read_and_long(
    path: str, field: dict[str, Any]
) -> None:
    body = {"messages": [USER], "input": "a", "prompt": "a", "max_tokens": 5, **field}
    with pytest.raises(RefusedError, match="at most 262144 bytes") as refused:
        PROTOCOL_OF[path].read(json.dumps(body).encode(), History())
    assert (refused.value.status, refused.value.param) == (400, next(iter(field)))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.path)
@pytest.mark.parametrize(
    "unread",
    [{"x": "y" * 300_000}, {"x": [{"a": 1}] * 60_000}, {f"x{n}": 1 for n in range(30_000)}],
    ids=["a text", "an array", "names"],
)
def test_fields_that_are_not_read_may_be_long_and_count_in_the_digest(
    protocol: Any, unread: dict[str, Any]
) -> None:
    def read(said: str = "hello", **more: Any) -> Request:
        told = [{"role": "user", "content": said}]
        given = {"prompt": said} if protocol.name == "completions" else {"input": told}
        body = {"messages": told, **given, "temperature": 1, **more}
        return protocol.read(json.dumps(body).encode(), History())

    first, again = read(**unread), read(**unread)
    changed = [read("bye", **unread), read(**unread, y=1), read(**unread, temperature=0), read()]
    assert (first.messages, first.prompts) == (read().messages, read().prompts)
    assert first.unused == ("temperature",)
    assert first.body_digest == again.body_digest
    assert len({first.body_digest, *(each.body_digest for each in changed)}) == 5


def test_a_history_goes_on_beside_a_long_field_that_is_not_read() -> None:
    """What is read of a body behind a known one is the same as of the whole body."""
    first = json.dumps({"messages": [USER], "x": "y" * 300_000}).encode()
    later = json.dumps({"messages": [USER, USER], "x": "y" * 300_000}).encode()
    history = History()
    items = chat_of(first, history).items
    assert items is not None
    history.bodies.note(first, items)
    begin = history.bodies.begin_of(later, protocol="chat_completions")
    assert begin is not None
    found = PROTOCOLS[0].read(begin.without_known(later), history, begin.items)
    assert found.body_digest == chat_of(later, history).body_digest


def test_calls_are_refused_by_their_count_before_they_are_read() -> None:
    message = {"role": "assistant", "tool_calls": [{"no": "call"}] * (MESSAGES_MAX + 1)}
    with pytest.raises(RefusedError) as refused:
        PROTOCOLS[0].read(json.dumps({"messages": [USER, message]}).encode(), History())
    assert refused.value.param == "messages[1].tool_calls"


MANY = [
    ("/v1/chat/completions", {"messages": []}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": []}]},
        "messages[0].content",
    ),
    ("/v1/chat/completions", {"messages": [USER], "tools": []}, "tools"),
    ("/v1/messages", {"messages": []}, "messages"),
    ("/v1/messages", {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ("/v1/messages", {"messages": [USER], "system": []}, "system"),
    ("/v1/messages", {"messages": [USER], "tools": []}, "tools"),
    ("/v1/responses", {"input": []}, "input"),
    ("/v1/responses", {"input": [{"content": []}]}, "input[0].content"),
    ("/v1/responses", {"input": "a", "tools": []}, "tools"),
]


@pytest.mark.parametrize(("path", "body", "param"), MANY)
def test_a_long_array_is_read_no_further_than_its_limit(
    path: str, body: dict[str, Any], param: str
) -> None:
    """The item behind the first one too many is of a wrong type, and nobody says so."""
    items = ",".join([ITEM] * (MESSAGES_MAX + 1)) + ",5"
    text = json.dumps(body).replace("[]", f"[{items}]")
    with pytest.raises(RefusedError, match=f"at most length {MESSAGES_MAX}") as refused:
        PROTOCOL_OF[path].read(text.encode(), History())
    assert refused.value.param == param


def test_other_threads_run_between_two_items_of_an_array() -> None:
    """Items are decoded as they are asked for: the wrong one is not looked at before its turn."""
    items = items_in(Raw(b'["a", "b", 3]'), msgspec.json.Decoder(str), where="messages")
    assert [next(items), next(items)] == [("messages[0]", "a"), ("messages[1]", "b")]
    with pytest.raises(RefusedError, match=r"Expected `str`, got `int` - at `\$.messages\[2\]`"):
        next(items)


def test_messages_and_results_and_parts_are_limited_together() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "b"}
    text = {"type": "text", "text": "a"}
    for block, count in ((result, MESSAGES_MAX // 2 + 1), (text, PARTS_MAX // 2 + 1)):
        halves = [{"role": "user", "content": [block] * (count // 2 + 1)}] * 4
        with pytest.raises(RefusedError, match="at most 10000 messages and results, and 30000"):
            read_messages(halves)


def test_a_wrong_call_is_refused_by_its_place() -> None:
    calls = [CALL, {"id": "d", "function": {"name": 5}}]
    body = {"messages": [USER, {"role": "assistant", "tool_calls": calls}]}
    with pytest.raises(RefusedError) as refused:
        PROTOCOLS[0].read(json.dumps(body).encode(), History())
    assert refused.value.param == "messages[1].tool_calls[1].function.name"
