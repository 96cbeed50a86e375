"""A protocol reads requests into ordered parts and writes replies in their order."""

import json
from typing import Any

import orjson

from forgemq_gateway.core.history import History
from forgemq_gateway.core.replies import Answer, Reply
from forgemq_gateway.core.requests import Call, Echo, Text, Thinking, ToolResult, chat_form
from forgemq_gateway.protocols.chat_completions import ChatCompletions


def read(*messages: dict[str, Any]) -> Any:
    return ChatCompletions().read(json.dumps({"messages": messages}).encode(), History())


def events(stream: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line]
    return [orjson.loads(line) for line in lines[:-1]]


def test_a_message_has_its_reasoning_text_and_calls_as_parts() -> None:
    function = {"name": "find", "arguments": {"a": 1}}
    request = read(
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "tool_calls": [{"id": "c1", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    )
    assert request.messages[0].parts == (
        Thinking("hm"),
        Text("ab"),
        Call("c1", "find", '{"a": 1}'),
    )
    assert request.messages[1].parts == (ToolResult("c1", "found"),)
    assert [request.echo(0), request.echo(1)] == [Echo("hm"), Echo()]


def test_the_chat_form_of_a_message_reads_back_as_the_same_message() -> None:
    request = read(
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "reasoning_content": "hm", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "found", "name": "f"},
        {"role": "user", "content": ""},
    )
    again = read(*(chat_form(message) for message in request.messages))
    assert again.messages == request.messages
    assert again.digests == request.digests


def test_a_stream_has_the_parts_of_the_reply_in_their_order() -> None:
    reply = Reply(
        parts=(Text("a"), Call("c1", "f", "{}"), Thinking("hm"), Text("b"), Call("c2", "g", "{}"))
    )
    answer = Answer(
        request_id="r",
        created_s=1,
        model="m",
        reply=reply,
        finish_reason="tool_calls",
        context_tokens=3,
        output_tokens=2,
    )
    chunks = events(ChatCompletions().stream(read({"role": "user"})).finish([answer]))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [next(iter(delta), "") for delta in deltas] == [
        "role",
        "content",
        "tool_calls",
        "reasoning_content",
        "content",
        "tool_calls",
        "",
    ]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [(call["index"], call["id"]) for call in calls] == [(0, "c1"), (1, "c2")]
