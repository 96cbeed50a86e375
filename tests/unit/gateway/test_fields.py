"""Fields of chat completions that are done, refused by name, or named as unused."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.requests import Request, ToolResult, chat_form
from forgemq_gateway.protocols.chat_body import request_of
from forgemq_gateway.settings import GatewaySettings
from forgemq_settings.environment import SettingsError, parse
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import ADMIN_KEY, SETTINGS, configuration_of, plain_http, running

HELLO = {"role": "user", "content": "hello"}


def read(**fields: Any) -> Request:
    return request_of(json.dumps({"messages": [HELLO], **fields}).encode())


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("response_format", {"type": "structural_tag", "structures": []}),
        ("logit_bias", {"5": -100}),
        ("functions", [{"name": "find"}]),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
    ],
)
def test_what_would_change_the_form_of_a_reply_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(RefusedError) as refused:
        read(**{param: value})
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "find", "parameters": {}},  # As in responses.
        {"name": "find", "input_schema": {}},  # As in Anthropic's messages.
        {"type": "function", "function": None},
    ],
)
def test_a_tool_that_the_model_would_not_be_shown_is_refused_by_name(tool: Any) -> None:
    web_search = {"type": "web_search"}
    with pytest.raises(RefusedError) as refused:
        read(tools=[web_search, tool])
    assert (refused.value.status, refused.value.param) == (400, "tools[1].function")
    assert read(tools=[web_search]).tools == ()


def test_the_same_fields_without_effect_are_taken() -> None:
    request = read(
        response_format={"type": "text"},
        tool_choice="auto",
        logit_bias={},
        functions=[],
        chat_template_kwargs={},
        continue_final_message=False,
        add_generation_prompt=True,
        n=1,
        seed=None,
    )
    assert request.unused == ()


def test_a_body_with_its_keys_in_another_order_is_the_same_body() -> None:
    first = read(metadata={"turn": "t", "session": "s"}, temperature=1)
    again = read(temperature=1.0, metadata={"session": "s", "turn": "t"})
    other = read(metadata={"turn": "t", "session": "u"}, temperature=1)
    assert first.body_digest == again.body_digest != other.body_digest


def test_what_the_episode_decides_in_the_clients_place_is_named() -> None:
    assert read(seed=7, temperature=0).unused == ("temperature", "seed")
    thinking = {"enable_thinking": False}
    assert read(chat_template_kwargs=thinking).unused == ("chat_template_kwargs",)


@pytest.mark.parametrize(
    ("fields", "call_id"), [({}, ""), ({"id": "c"}, "c"), ({"tool_call_id": "d", "id": "c"}, "d")]
)
def test_a_tool_message_is_taken_with_its_calls_id_under_either_name_or_without(
    fields: dict[str, str], call_id: str
) -> None:
    body = {"messages": [HELLO, {"role": "tool", "content": "found", **fields}]}
    request = request_of(json.dumps(body).encode())
    assert request.messages[1].parts == (ToolResult(call_id, "found"),)
    again = {"messages": [chat_form(message) for message in request.messages]}
    assert request_of(json.dumps(again).encode()).messages == request.messages


async def test_paths_models_and_headers_say_what_there_is(model: Path) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()

        async def ask(method: str, path: str, key: str = "", body: Any = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with plain_http() as client:
                url = f"{world.base_url}{path}"
                return await client.request(method, url, json=body, headers=headers)

        key = claim["key"]
        unspoken = await ask("POST", "/v1/embeddings", key, {})
        anthropic = await ask("POST", "/v1/messages/batches", key, {})
        keyless = [await ask("POST", p, body={}) for p in ("/v1/responses", "/v1/messages")]
        admin_key = await ask("POST", "/v1/responses", ADMIN_KEY, {})
        admin = await ask("GET", "/v1/run")
        models = [await ask("GET", f"/v1/models{name}", key) for name in ("", "/gpt-x", "/a/b")]
        chat = "/v1/chat/completions"
        plain = await ask("POST", chat, key, {"messages": [HELLO]})
        seeded = await ask("POST", chat, key, {"messages": [HELLO], "seed": 1})
        stream = await ask("POST", chat, key, {"messages": [HELLO], "top_p": 1, "stream": True})
    assert unspoken.status_code == 404
    assert unspoken.json()["error"]["message"] == (
        "agents have no POST /v1/embeddings; there are POST /v1/chat/completions, "
        "POST /v1/completions, POST /v1/messages, POST /v1/responses and GET /v1/models"
    )
    assert anthropic.json()["type"] == "error"
    assert anthropic.json()["error"]["type"] == "not_found_error"
    assert "POST /v1/chat/completions" in anthropic.json()["error"]["message"]
    assert [(each.status_code, "admin" in each.text) for each in keyless] == [(401, False)] * 2
    assert keyless[1].json()["type"] == "error"
    assert admin_key.status_code == 401
    assert "admin key" in admin.text
    assert models[0].json()["data"][0]["id"] == "policy"
    assert [each.json()["id"] for each in models[1:]] == ["gpt-x", "a/b"]
    assert "x-forgemq-unused" not in plain.headers
    assert seeded.headers["x-forgemq-unused"] == "seed"
    assert stream.headers["x-forgemq-unused"] == "top_p"


def given_models(names: str) -> GatewaySettings:
    environ = {"FORGEMQ_GATEWAY_MODELS": names, "FORGEMQ_GATEWAY_ADMIN_KEY": ADMIN_KEY}
    return parse(GatewaySettings, prefix="FORGEMQ_GATEWAY_", environ=environ)


async def test_the_models_that_are_listed_are_those_of_the_setting(model: Path) -> None:
    log, named = MemoryLog(run="r", clock_ms=wall_ms).open, given_models("gpt-5-codex, claude-x,")
    settings = msgspec.structs.replace(SETTINGS, models=named.models)
    async with running(log, configuration_of(model), lambda _: "yes", settings=settings) as (w, _):
        client = w.client(await w.episode())
        listed = [each.id async for each in client.models.list()]
    assert listed == ["gpt-5-codex", "claude-x"]


def test_a_list_of_models_without_a_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="FORGEMQ_GATEWAY_MODELS: Expected `array` of length"):
        given_models(" , ")
