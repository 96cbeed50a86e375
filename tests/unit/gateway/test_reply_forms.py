"""The form that a client demands of a reply: as it is read, sent to the lane, and refused."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.history import History
from forgemq_gateway.core.json_schemas import unenforced
from forgemq_gateway.core.requests import FORM_BYTES_MAX, ReplyForm, Request
from forgemq_gateway.protocols.chat_body import request_of
from forgemq_gateway.protocols.messages import Messages
from forgemq_gateway.protocols.responses import Responses
from tests.unit.gateway.scripted_lane import FailAttempt, wall_ms
from tests.unit.gateway.world import configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "find"}}
FIND_CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>'


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or SCHEMA}}


TOOLS: list[Any] = [tool("find"), tool("buy")]


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 20}


def read(**fields: Any) -> Request:
    return request_of(json.dumps({"messages": HELLO, **fields}).encode())


def form_of_messages(**fields: Any) -> Request:
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("find", "buy")]
    body = {"messages": HELLO, "tools": tools, **fields}
    return Messages().read(json.dumps(body).encode(), History())


def form_of_response(**fields: Any) -> Request:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("find", "buy")]
    body = {"input": "hello", "tools": tools, **fields}
    return Responses().read(json.dumps(body).encode(), History())


@pytest.mark.parametrize(
    ("chat", "messages", "response"),
    [
        (
            {"tool_choice": "required"},
            {"tool_choice": {"type": "any"}},
            {"tool_choice": "required"},
        ),
        (
            {"tool_choice": NAMED},
            {"tool_choice": {"type": "tool", "name": "find"}},
            {"tool_choice": {"type": "function", "name": "find"}},
        ),
        (
            {"parallel_tool_calls": False},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"parallel_tool_calls": False},
        ),
        (
            {"json_schema": SCHEMA},
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        ),
        (
            {"response_format": {"type": "text"}},
            {"tool_choice": {"type": "none"}},
            {"text": {"verbosity": "low"}},
        ),
    ],
    ids=["any call", "one named call", "one call at most", "a schema", "anything"],
)
def test_every_protocol_demands_the_same_form_in_its_own_words(
    chat: Any, messages: Any, response: Any
) -> None:
    wanted = read(tools=TOOLS, **chat)
    for request in (form_of_messages(**messages), form_of_response(**response)):
        assert request.is_one_call == wanted.is_one_call
        assert (request.form is None) == (wanted.form is None)
        if request.form is not None and wanted.form is not None:
            assert request.form.answer == wanted.form.answer
            assert request.form.functions == wanted.form.functions


def param_of_refusal(**fields: Any) -> str | None:
    with pytest.raises(RefusedError) as refused:
        read(**fields)
    assert refused.value.status == 400
    return refused.value.param


def constraint_of(record: Any) -> Any:
    return json.loads(record.constraint.structural_tag)["format"]


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"response_format": {"type": "json_object"}}, json_format({"type": "object"})),
        ({"response_format": JSON_SCHEMA}, json_format(SCHEMA)),
        ({"guided_json": SCHEMA}, json_format(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, json_format(SCHEMA)),
        ({"json_schema": json.dumps(SCHEMA)}, json_format(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, json_format(SCHEMA)),
        ({"guided_regex": "a|b"}, {"type": "regex", "pattern": "a|b"}),
        ({"regex": "a|b"}, {"type": "regex", "pattern": "a|b"}),
        ({"structured_outputs": {"regex": "a"}}, {"type": "regex", "pattern": "a"}),
        ({"ebnf": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"guided_grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        (
            {"guided_choice": ["a", "b"]},
            {
                "type": "or",
                "elements": [
                    {"type": "const_string", "value": "a"},
                    {"type": "const_string", "value": "b"},
                ],
            },
        ),
    ],
)
def test_every_way_to_ask_for_a_form_is_read_as_a_format(
    fields: dict[str, Any], answer: dict[str, Any]
) -> None:
    (param, value) = next(iter(fields.items()))
    inner = next(iter(value)) if param == "structured_outputs" else ""
    named = f"{param}.{inner}" if inner else param
    assert read(**fields).form == ReplyForm(answer=answer, param=named)


@pytest.mark.parametrize(
    ("fields", "functions", "is_one_call"),
    [
        ({"tool_choice": "required"}, ("find", "buy"), False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("find", "buy"), True),
        ({"tool_choice": NAMED}, ("find",), True),
        ({"tool_choice": "required", "response_format": JSON_SCHEMA}, ("find", "buy"), False),
    ],
)
def test_a_required_or_named_call_comes_instead_of_an_answer(
    fields: dict[str, Any], functions: tuple[str, ...], is_one_call: bool
) -> None:
    request = read(tools=TOOLS, **fields)
    assert request.form == ReplyForm(functions=functions, param="tool_choice")
    assert request.is_one_call == is_one_call


def test_an_answer_of_a_form_leaves_the_calls_that_tool_choice_leaves() -> None:
    answer = json_format(SCHEMA)
    auto = read(tools=TOOLS, response_format=JSON_SCHEMA)
    none = read(tools=TOOLS, response_format=JSON_SCHEMA, tool_choice="none")
    assert auto.form == ReplyForm(answer=answer, functions=("find", "buy"), param="response_format")
    assert none.form == ReplyForm(answer=answer, param="response_format")
    assert read(tools=TOOLS, parallel_tool_calls=False).form is None


def test_what_cannot_be_met_is_refused_by_name() -> None:
    other = {"type": "function", "function": {"name": "sell"}}
    strict = {"name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}}
    assert param_of_refusal(tool_choice="required") == "tool_choice"
    assert param_of_refusal(tool_choice=NAMED) == "tool_choice"
    assert param_of_refusal(tool_choice=other, tools=TOOLS) == "tool_choice"
    assert param_of_refusal(tool_choice={"type": "function"}, tools=TOOLS) == "tool_choice"
    assert param_of_refusal(response_format={"type": "grammar"}) == "response_format"
    assert param_of_refusal(response_format={"type": "json_schema"}) == "response_format"
    assert param_of_refusal(regex="a", ebnf="b") == "ebnf"
    assert param_of_refusal(guided_json="{") == "guided_json"
    assert param_of_refusal(regex="a" * FORM_BYTES_MAX) == "regex"
    schema = {"type": "json_schema", "json_schema": strict}
    assert param_of_refusal(response_format=schema) == "response_format"
    strict["strict"] = False
    assert read(response_format=schema).form is not None


def allowed_tools(mode: str | None, *names: str) -> dict[str, Any]:
    """The choice among some tools, as chat completions have it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def allowed_in_response(mode: str | None, *names: str) -> dict[str, Any]:
    """The same of responses."""
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@pytest.mark.parametrize(
    ("choice", "functions", "unused"),
    [
        (("required", "buy"), ("buy",), ()),
        (("required", "buy", "find"), ("find", "buy"), ()),
        (("required", "sell"), ("find", "buy"), ("tool_choice",)),
        (("auto", "find", "buy"), (), ()),
        (("auto", "buy"), (), ("tool_choice",)),
        (("auto",), (), ("tool_choice",)),
        ((None, "sell"), (), ("tool_choice",)),
    ],
)
def test_one_of_some_tools_is_required_or_all_are_offered_and_the_choice_is_named(
    choice: Any, functions: tuple[str, ...], unused: tuple[str, ...]
) -> None:
    wanted = ReplyForm(functions=functions, param="tool_choice") if functions else None
    for request in (
        read(tools=TOOLS, tool_choice=allowed_tools(*choice)),
        form_of_response(tool_choice=allowed_in_response(*choice)),
    ):
        assert request.form == wanted
        assert (request.unused, request.is_one_call) == (unused, False)


def test_an_answer_of_a_form_leaves_the_calls_of_some_tools() -> None:
    request = read(
        tools=TOOLS, tool_choice=allowed_tools("auto", "buy"), response_format=JSON_SCHEMA
    )
    assert request.form is not None
    assert (request.form.functions, request.unused) == (("buy",), ())


@pytest.mark.parametrize(
    "choice",
    [
        "some_day",
        {},
        {"type": None},
        {"type": "web_search_preview"},
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "allowed_tools", "allowed_tools": {"tools": [{"name": ["find"]}, 5]}},
    ],
)
def test_a_choice_of_a_kind_that_is_not_known_is_named_and_leaves_all_calls(choice: Any) -> None:
    for request in (read(tools=TOOLS, tool_choice=choice), form_of_response(tool_choice=choice)):
        assert (request.form, request.unused) == (None, ("tool_choice",))
        assert not request.is_one_call
    kind = choice if isinstance(choice, str) else choice.get("type", "some_day")
    message = form_of_messages(tool_choice={"type": kind, "name": None})
    assert message.unused == (() if kind is None else ("tool_choice",))


def test_any_is_another_word_for_required() -> None:
    assert (
        read(tools=TOOLS, tool_choice="any").form == read(tools=TOOLS, tool_choice="required").form
    )


def test_a_form_whose_parts_are_null_is_one_without_them() -> None:
    assert read(response_format={"type": None}).form is None
    nameless = {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}
    assert read(response_format=nameless).form == ReplyForm(
        answer=json_format({}), param="response_format"
    )
    assert form_of_messages(output_config={"format": {"type": "text"}}).form is None
    assert form_of_response(text={"format": {"type": None, "schema": None}}).form is None


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        (SCHEMA, None),
        ({"properties": {"not": {"type": "string"}}, "default": {"if": 1}}, None),
        ({"type": "string", "format": "date"}, None),
        ({"type": "string", "minLength": 1, "maxLength": 2}, None),
        ({"items": {"multipleOf": 2}}, "multipleOf"),
        ({"$defs": {"a": {"anyOf": [{"not": {}}]}}}, "not"),
        ({"type": "string", "format": "color"}, "format 'color'"),
        ({"type": "string", "pattern": "a", "minLength": 1}, "length with pattern"),
    ],
)
def test_what_the_grammar_does_not_enforce_is_found_at_any_depth(
    schema: dict[str, Any], ignored: str | None
) -> None:
    assert unenforced(schema) == ignored


async def test_the_lane_gets_the_grammar_of_the_call_and_a_plain_request_none(model: Path) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: FIND_CALL) as (world, lanes):
        client = world.client(await world.episode())
        await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
        forced = await client.chat.completions.create(
            model="m",
            messages=HELLO,
            tools=TOOLS,
            tool_choice=NAMED,  # type: ignore[arg-type]  # a literal without its type
        )
    plain, named = (asked.record for asked in lanes[0].seen)
    assert forced.choices[0].finish_reason == "tool_calls"
    assert (plain.constraint, plain.sampling.stop_token_ids) == (None, (2,))
    reasoning, call = constraint_of(named)["elements"]
    assert reasoning["type"] == "optional"
    begin, end = call["begin"]["token"], call["end"]["token"]
    assert lanes[0]._rendering.decode([begin, end]) == "<tool_call></tool_call>"
    assert call["content"]["elements"] == [
        {"type": "const_string", "value": '\n{"name": "find", "arguments": '},
        json_format(SCHEMA),
        {"type": "const_string", "value": "}\n"},
    ]
    assert named.sampling.stop_token_ids == (2, end)


async def test_without_parallel_calls_the_end_of_the_first_call_ends_the_output_unconstrained(
    model: Path,
) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, lanes):
        client = world.client(await world.episode())
        await client.chat.completions.create(
            model="m", messages=HELLO, tools=TOOLS, parallel_tool_calls=False
        )
    record = lanes[0].seen[0].record
    assert record.constraint is None
    stops = record.sampling.stop_token_ids
    assert lanes[0]._rendering.decode(stops) == "<|im_end|></tool_call>"


async def test_a_form_that_the_engine_refuses_is_a_400_after_one_attempt(model: Path) -> None:
    def script(_: object) -> str:
        raise FailAttempt("engine: Failed to compile", is_constraint_refused=True)

    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), script) as (world, lanes):
        client = world.client(await world.episode())
        with pytest.raises(openai.BadRequestError, match="cannot be enforced: engine: Failed"):
            await client.chat.completions.create(
                model="m", messages=HELLO, extra_body={"regex": "((("}
            )
    assert len(lanes[0].seen) == 1
