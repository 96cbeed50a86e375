"""A body that begins as an earlier one is read as if all of it were read."""

import gc
import json
from typing import Any

import msgspec
import pytest

from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.held_bytes import HeldBytes
from forgemq_gateway.core.history import History
from forgemq_gateway.core.read_bodies import KEPT_MAX, KNOWN_ITEM
from forgemq_gateway.core.requests import MESSAGES_MAX, Request
from forgemq_gateway.protocols import PROTOCOLS
from forgemq_gateway.wire_protocol import WireProtocol

PROTOCOL_OF = {protocol.path: protocol for protocol in PROTOCOLS}
CHAT = PROTOCOL_OF["/v1/chat/completions"]
USER = {"role": "user", "content": "a"}
CALL = {"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}

# One conversation in each protocol; every prefix of it that ends with a user or a tool is asked.
TOLD: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": 'a "quoted" \u00e9\n'}]},
        {"role": "assistant", "content": None, "reasoning_content": "t", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "assistant", "content": "<think>t</think>b"},
        {"role": "user", "content": "\U0001f600"},
    ],
    "/v1/messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "r"},
                {"type": "text", "text": "c"},
            ],
        },
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ],
    "/v1/responses": [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ],
}
FIELD_OF = {path: "input" if path == "/v1/responses" else "messages" for path in TOLD}


class Episode:
    """Reads bodies as the route does, and compares each with what the whole body says."""

    def __init__(self, protocol: WireProtocol) -> None:
        self.held = HeldBytes()
        self.history = History(self.held)
        self.protocol = protocol
        self.read_bytes: list[int] = []

    def read(self, body: bytes) -> Request:
        bodies = self.history.bodies
        begin = bodies.begin_of(body, protocol=self.protocol.name)
        whole = self.protocol.read(body, self.history)
        found = whole
        if begin is not None:
            shortened = begin.without_known(body)
            found = self.protocol.read(shortened, self.history, begin.items)
        self.read_bytes.append(len(body if begin is None else shortened))
        assert content(found) == content(whole)
        if found.items is not None:
            assert whole.items is not None
            assert content_of_items(found) == content_of_items(whole)
            bodies.note(body, found.items)
        return found


def content(request: Request) -> Request:
    return msgspec.structs.replace(request, items=None)


def content_of_items(request: Request) -> tuple[int, int, Any]:
    items = request.items
    assert items is not None
    return items.start, items.rest, (items.count, items.found)


def bodies(path: str, *, is_first: bool, style: dict[str, Any]) -> list[bytes]:
    """A body for each turn; the messages are its first field or its last."""
    told, field = TOLD[path], FIELD_OF[path]
    asked = [
        number
        for number, message in enumerate(told, start=1)
        if message.get("role", "tool") in ("user", "tool") and message.get("type") != "reasoning"
    ]
    made = []
    for count in asked:
        messages = {field: told[:count]}
        rest = {"model": "m", "metadata": {field: told[:1]}, "stream": False}
        made.append(json.dumps({**messages, **rest} if is_first else {**rest, **messages}, **style))
    return [text.encode() for text in made]


@pytest.mark.parametrize("path", TOLD)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "style",
    [{}, {"separators": (",", ":"), "ensure_ascii": False}, {"indent": 2}],
    ids=["spaces", "compact", "lines"],
)
def test_each_turn_is_read_as_its_whole_body(
    path: str, is_first: bool, style: dict[str, Any]
) -> None:
    episode = Episode(PROTOCOL_OF[path])
    for body in bodies(path, is_first=is_first, style=style):
        episode.read(body)
    assert len(episode.history.bodies._kept) >= 1


def test_of_a_long_history_only_what_is_new_is_read() -> None:
    episode = Episode(CHAT)
    long = [{"role": "user", "content": "x" * 1000}] * 100
    for turn in range(3):
        messages = [*long, *[USER] * turn]
        episode.read(json.dumps({"messages": messages, "model": "m"}).encode())
    assert episode.read_bytes[0] > 100_000
    assert max(episode.read_bytes[1:]) < 200


def test_a_body_with_any_other_byte_before_its_last_item_is_read_whole() -> None:
    episode = Episode(CHAT)
    body = json.dumps({"messages": [USER], "model": "m"}).encode()
    episode.read(body)
    end = body.rindex(b"]")
    for index in range(end):
        other = body[:index] + bytes([body[index] ^ 1]) + body[index + 1 :]
        assert episode.history.bodies.begin_of(other, protocol="chat_completions") is None
    begin = episode.history.bodies.begin_of(body, protocol="chat_completions")
    assert begin is not None
    assert begin.text == body[:end]
    assert episode.history.bodies.begin_of(body, protocol="messages") is None


@pytest.mark.slow
@pytest.mark.parametrize("path", TOLD)
def test_kept_messages_are_nothing_that_the_collector_of_cycles_visits(path: str) -> None:
    """A few bodies of 10,000 messages would else hold the event loop for a tenth of a second."""
    history = History(HeldBytes())
    body = json.dumps({FIELD_OF[path]: TOLD[path], "model": "m", "max_tokens": 1}).encode()
    messages = PROTOCOL_OF[path].read(body, history, None).messages
    gc.collect()
    parts = [part for message in messages for part in message.parts]
    assert parts
    assert [each for each in (*messages, *parts) if gc.is_tracked(each)] == []


def test_a_second_array_of_messages_behind_the_known_one_is_refused_in_a_shortened_body() -> None:
    """The whole body is then read, whose last array counts."""
    episode = Episode(CHAT)
    episode.read(b'{"messages":[{"role":"user","content":"a"}]}')
    twice = b'{"messages":[{"role":"user","content":"a"}],"messages":[{"role":"user"}]}'
    begin = episode.history.bodies.begin_of(twice, protocol="chat_completions")
    assert begin is not None
    with pytest.raises(RefusedError, match="messages must be there once"):
        CHAT.read(begin.without_known(twice), episode.history, begin.items)


def test_an_array_that_stands_elsewhere_first_is_not_taken_for_the_messages() -> None:
    array = b'[{"role":"user","content":"a"}]'
    request = CHAT.read(b'{"metadata":{"x":%b},"messages":%b}' % (array, array), History())
    assert request.items is None


def test_the_placeholder_is_no_message_of_a_client() -> None:
    with pytest.raises(
        RefusedError, match=r"Expected `object`, got `str` - at `\$\.messages\[0\]`"
    ):
        CHAT.read(b'{"messages":[%b]}' % KNOWN_ITEM, History())


def test_known_items_count_in_the_limit() -> None:
    episode = Episode(CHAT)
    full = [USER] * MESSAGES_MAX
    episode.read(json.dumps({"messages": full}).encode())
    longer = json.dumps({"messages": [*full, USER]}).encode()
    begin = episode.history.bodies.begin_of(longer, protocol="chat_completions")
    assert begin is not None
    with pytest.raises(RefusedError, match=f"over {MESSAGES_MAX} items"):
        CHAT.read(begin.without_known(longer), episode.history, begin.items)


def test_a_reply_that_is_still_open_is_not_cut() -> None:
    """Items of one reply are one message, so a body that ends within one is not gone on from."""
    episode = Episode(PROTOCOL_OF["/v1/responses"])
    told = TOLD["/v1/responses"]
    for count in (1, 2, 3, 4, 5, 6):
        episode.read(json.dumps({"input": told[:count]}).encode())


def test_histories_of_several_agents_are_kept_and_the_oldest_goes_first() -> None:
    episode = Episode(CHAT)

    def body(agent: int, turns: int) -> bytes:
        first = {"role": "user", "content": f"agent {agent}"}
        return json.dumps({"messages": [first, *[USER] * turns]}).encode()

    for turns in range(3):
        for agent in range(KEPT_MAX):
            episode.read(body(agent, turns))
    found = episode.history.bodies

    def is_known(agent: int) -> bool:
        return found.begin_of(body(agent, 3), protocol="chat_completions") is not None

    assert [is_known(agent) for agent in range(KEPT_MAX)] == [True] * KEPT_MAX
    episode.read(body(KEPT_MAX, 0))
    assert [is_known(agent) for agent in range(KEPT_MAX)] == [False] + [True] * (KEPT_MAX - 1)


def test_their_bytes_count_until_they_are_forgotten() -> None:
    episode = Episode(CHAT)
    text = {"role": "user", "content": "x" * 10_000}
    episode.read(json.dumps({"messages": [text]}).encode())
    one = episode.held.total
    assert 20_000 < one < 21_000
    episode.read(json.dumps({"messages": [text, text]}).encode())
    assert 40_000 < episode.held.total < 42_000
    episode.history.bodies.forget()
    assert episode.held.total == 0
