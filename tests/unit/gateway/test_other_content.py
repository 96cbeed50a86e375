"""What a newer or odd client may send: unknown kinds, null, and texts in other places."""

import json
from pathlib import Path
from typing import Any

import pytest

from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.history import History
from forgemq_gateway.core.requests import Call, Request, Text, Thinking, ToolResult
from forgemq_gateway.protocols import PROTOCOLS
from tests.unit.gateway.talk import talk

PROTOCOL_OF = {protocol.path: protocol for protocol in PROTOCOLS}
USER: dict[str, Any] = {"role": "user", "content": "hello"}
FACT = [{"type": "text", "text": "FACT"}]
SEARCH = {"type": "search_result", "source": "s", "title": "t", "content": FACT}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
SECOND_CALL = {**CALL, "call_id": "d"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}


def chat(*messages: Any) -> Request:
    body = json.dumps({"messages": messages}).encode()
    return PROTOCOL_OF["/v1/chat/completions"].read(body, History())


def messages(*given: Any, **fields: Any) -> Request:
    body = json.dumps({"messages": given, **fields}).encode()
    return PROTOCOL_OF["/v1/messages"].read(body, History())


def response(*items: Any, **fields: Any) -> Request:
    body = json.dumps({"input": items, **fields}).encode()
    return PROTOCOL_OF["/v1/responses"].read(body, History())


def reply(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}


def blocks_of(role: str, *blocks: Any) -> Request:
    return messages({"role": role, "content": list(blocks)})


def result(content: Any) -> str:
    """The text of a tool's result with this content."""
    request = blocks_of("user", {"type": "tool_result", "tool_use_id": "c", "content": content})
    (part,) = request.messages[0].parts
    assert isinstance(part, ToolResult)
    return part.text


@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        (call(id=None), {"function": {"name": "f"}}),
        (call(type=None), call()),
        (call(type="new", index=0, custom=None), call()),
        (call(function={"name": "f", "arguments": None}), call()),
    ],
)
def test_a_call_with_nulls_and_new_fields_is_the_same_call(odd: Any, plain: Any) -> None:
    found, wanted = (chat(USER, reply(content=None, tool_calls=[each])) for each in (odd, plain))
    assert found.messages == wanted.messages
    assert found.digests == wanted.digests


def test_a_call_of_a_custom_tool_is_a_call_with_its_input() -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    request = chat(USER, reply(tool_calls=[custom]))
    assert request.messages[1].parts == (Call("c", "patch", '{"input":"x"}'),)


@pytest.mark.parametrize(
    ("reasoning", "thought"),
    [
        ([{"type": "text", "text": "so"}, {"type": "text", "text": "me"}], "some"),
        (["so", "me"], "some"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "some"}]}], "some"),
        ({"text": "some"}, "some"),
    ],
)
def test_reasoning_in_blocks_is_its_text_and_changes_no_digest(
    reasoning: Any, thought: str
) -> None:
    odd = chat(USER, reply(content="a", reasoning_content=reasoning))
    plain = chat(USER, reply(content="a", reasoning_content=thought))
    bare = chat(USER, reply(content="a", reasoning_content=[]))
    assert odd.messages == plain.messages
    assert odd.messages[1].parts == (Thinking(thought), Text("a"))
    assert odd.digests == plain.digests == bare.digests


def test_the_id_of_a_message_that_answers_no_call_may_be_anything() -> None:
    assert chat({**USER, "id": 7}).messages == chat(USER).messages
    answer = chat(USER, {"role": "tool", "id": "c", "content": "r"})
    assert answer.messages[1].parts == (ToolResult("c", "r"),)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text", "text": "a", "id": None, "name": {"x": 1}},
        {"type": "text", "text": "a", "signature": None, "input": None, "content": None},
        {"type": "new_text", "text": "a", "id": 5},
        {"type": "output_text", "text": "a", "annotations": []},
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_text_is_the_same_with_other_fields_and_under_another_name(role: str, block: Any) -> None:
    plain = blocks_of(role, {"type": "text", "text": "a"})
    assert blocks_of(role, block).messages == plain.messages
    assert blocks_of(role, block).digests == plain.digests
    chat_form = chat({"role": role, "content": [block]})
    assert chat_form.digests == chat({"role": role, "content": "a"}).digests


@pytest.mark.parametrize(
    "block",
    [
        {"type": "new_kind", "id": None, "text": None},
        {"type": "new_kind", "text": {"a": 1}},
        {"type": "redacted_thinking", "data": "zz"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": "x"}},
    ],
)
def test_what_the_model_did_not_say_is_no_part_of_its_echo(block: Any) -> None:
    odd = blocks_of("assistant", block, {"type": "text", "text": "a"})
    assert odd.digests == blocks_of("assistant", {"type": "text", "text": "a"}).digests
    odd = chat(USER, reply(content=[block, {"type": "text", "text": "a"}]))
    assert odd.digests == chat(USER, reply(content="a")).digests


def test_blocks_of_anthropic_with_nulls_are_as_without_them() -> None:
    thinking = {"type": "thinking", "thinking": "t", "signature": None}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": None, "caller": None}
    request = blocks_of("assistant", thinking, {"type": "text", "text": None}, use)
    assert request.messages[0].parts == (Thinking("t"), Text(""), Call("c", "f", "{}"))
    assert messages({"role": "user", "content": None}).messages[0].parts == (Text(""),)
    choice = {"type": None, "name": None, "disable_parallel_tool_use": None}
    assert messages(USER, tool_choice=choice).form is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (FACT, "FACT"),
        ([{"type": "search_result", "content": FACT}], "FACT\n"),
        ([SEARCH, SEARCH], "t\ns\nFACT\nt\ns\nFACT\n"),
        ([{"type": "document", "source": {"type": "text", "data": "D"}}], "D"),
        (
            [{"type": "document", "title": "t", "source": {"type": "content", "content": FACT}}],
            "t\nFACT\n",
        ),
        (
            [{"type": "tool_reference", "tool_name": "f"}],
            '{"type":"tool_reference","tool_name":"f"}\n',
        ),
        (
            [{"type": "new", "id": "x", "content": [{"type": "newer", "content": FACT}]}],
            "FACT\n",
        ),
        ([{"type": "new"}, *FACT], '{"type":"new"}\nFACT'),
        ([{"type": "new", "blob": "A" * 5000}], '{"type":"new","blob":"..."}\n'),
        (None, ""),
    ],
)
def test_a_result_of_a_tool_has_all_text_of_its_blocks_or_their_json(
    content: Any, text: str
) -> None:
    assert result(content) == text


def test_a_search_result_of_the_user_or_the_system_is_read() -> None:
    assert blocks_of("user", SEARCH, *FACT).messages[0].parts == (
        Text("t\ns\nFACT\n"),
        Text("FACT"),
    )
    assert messages(USER, system=[SEARCH]).messages[0].parts == (Text("t\ns\nFACT"),)
    found = chat(USER, {"role": "tool", "tool_call_id": "c", "content": [SEARCH]})
    assert found.messages[1].parts == (ToolResult("c", "t\ns\nFACT\n"),)


def test_blocks_that_go_deeper_than_is_looked_are_json() -> None:
    block: dict[str, Any] = {"type": "new", "content": FACT}
    for _ in range(20):
        block = {"type": "new", "content": [block]}
    assert '"text": "FACT"' in result([block])


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (
            {"type": "tool_search_call", "call_id": "c", "arguments": {"q": "x"}},
            '{"type":"tool_search_call","arguments":{"q": "x"}}',
        ),
        (
            {"type": "mcp_call", "id": "m", "call_id": None, "name": "n", "output": "found"},
            '{"type":"mcp_call","name":"n","output":"found"}',
        ),
        ({"type": "future", "role": "critic", "content": FACT}, "FACT"),
        ({"type": "future", "role": "critic", "text": "so"}, "so"),
        ({"type": "message", "role": "critic", "content": "so"}, "so"),
        ({"type": None, "role": None, "content": "so", "name": None}, "so"),
    ],
)
def test_what_an_unknown_item_says_is_context(item: Any, said: str) -> None:
    request = response(USER, item, USER)
    assert [each.role for each in request.messages] == ["user"] * 3
    assert request.messages[1].parts == (Text(said),)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "compaction", "encrypted_content": "zz"},
        {"type": "future", "role": "critic", "content": []},
    ],
)
def test_an_item_that_says_nothing_is_left_out(item: Any) -> None:
    assert response(USER, item).messages == response(USER).messages


def test_an_unknown_item_between_two_of_a_reply_comes_behind_it() -> None:
    """The reply is then the one that was sampled, with both calls."""
    odd = {"type": "mcp_call", "name": "n", "output": "found"}
    plain = response(USER, CALL, SECOND_CALL, OUTPUT)
    mixed = response(USER, CALL, odd, SECOND_CALL, OUTPUT)
    assert mixed.digests[:2] == plain.digests[:2]
    assert [each.role for each in mixed.messages] == ["user", "assistant", "user", "tool"]
    before = response(odd, CALL, SECOND_CALL)
    assert [each.role for each in before.messages] == ["user", "assistant"]
    assert before.digests[1] == plain.digests[1]


@pytest.mark.parametrize(
    "odd",
    [
        {**CALL, "id": None, "namespace": None, "status": None, "role": None},
        {**CALL, "arguments": None},
        {**CALL, "arguments": {}},
        {**CALL, "output": 5, "input": {"x": 1}},
    ],
)
def test_a_call_of_a_response_is_the_same_with_nulls_objects_and_foreign_fields(odd: Any) -> None:
    plain = response(USER, CALL, OUTPUT)
    assert response(USER, odd, OUTPUT).messages == plain.messages
    assert response(USER, odd, OUTPUT).digests == plain.digests


def test_parts_of_an_unknown_kind_are_read_in_results_and_not_in_the_models_reply() -> None:
    output = {**OUTPUT, "output": [{"type": "new", "content": FACT}, {"type": "newer", "x": 1}]}
    assert response(USER, output).messages[1].parts == (
        ToolResult("c", 'FACT\n{"type":"newer","x":1}\n'),
    )
    said = [{"type": "output_text", "text": "a", "refusal": None}, {"type": "new", "x": 1}]
    odd = response(USER, {"role": "assistant", "content": said})
    assert odd.digests == response(USER, {"role": "assistant", "content": "a"}).digests


def test_an_input_may_be_null_if_a_response_is_continued_or_instructed() -> None:
    body = b'{"input": null, "instructions": "go on"}'
    request = PROTOCOL_OF["/v1/responses"].read(body, History())
    assert [each.role for each in request.messages] == ["system"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": ["hello"]}, "messages[0]"),
    ("/v1/chat/completions", {"messages": [{"role": "king"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [USER], "temperature": "0.7"}, "temperature"),
    (
        "/v1/chat/completions",
        {"messages": [reply(tool_calls=[{"type": "new"}])]},
        "messages[0].tool_calls[0].function",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    ("/v1/messages", {"messages": ["hello"]}, "messages[0]"),
    ("/v1/messages", {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0]"),
    ("/v1/responses", {"input": ["hello"]}, "input[0]"),
    ("/v1/responses", {"input": [{**CALL, "call_id": 5}]}, "input[0].call_id"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_what_cannot_be_used_is_refused_by_its_place(
    path: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        PROTOCOL_OF[path].read(json.dumps(body).encode(), History())
    assert refused.value.status == 400
    assert (refused.value.param or "").startswith(param)


async def test_an_echo_with_nulls_and_new_blocks_goes_on_from_the_sampled_tokens(
    model: Path,
) -> None:
    async with talk(model, lambda _: "<think>\nhm\n</think>\n\nyes") as agent:
        first = await agent.post("/v1/messages", {"max_tokens": 50, "messages": [USER]})
        thinking, text = first.json()["content"]
        echo = [{**thinking, "signature": None}, {"type": "new", "id": None}, {**text, "id": None}]
        searched = {"role": "user", "content": [SEARCH]}
        body = {"max_tokens": 50, "messages": [USER, reply(content=echo), searched]}
        second = await agent.post("/v1/messages", body)
        chain, seen, ended = await agent.chain(), agent.seen(), await agent.end()
    assert (first.status_code, second.status_code) == (200, 200)
    assert chain[1][: len(chain[0])] == chain[0]
    assert "t\ns\nFACT" in seen[1].text
    assert ended.forks == 0


def test_content_in_a_tools_result_that_is_no_text_is_said_to_be_left_out() -> None:
    """An agent cannot take it back: the rest of its episode would be refused."""
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
    paper = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
    said = {"type": "text", "text": "2 kB"}
    note = "[{} left out: the model reads text]\n2 kB".format
    assert result([picture, said]) == note("image")
    assert result([paper, said]) == note("document from base64")
    linked = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    (answered,) = chat({"role": "tool", "tool_call_id": "c", "content": [linked, said]}).messages
    assert answered.parts == (ToolResult("c", note("image_url")),)
    seen = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    output = [seen, {"type": "input_text", "text": "2 kB"}]
    (put,) = response({**OUTPUT, "output": output}).messages
    assert put.parts == (ToolResult("c", note("input_image")),)
    for ask in (
        lambda: chat({"role": "user", "content": [linked]}),
        lambda: blocks_of("user", picture),
        lambda: response({"role": "user", "content": [seen]}),
    ):
        with pytest.raises(RefusedError, match="is not supported: the model reads text"):
            ask()
