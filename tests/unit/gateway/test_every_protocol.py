"""What every protocol has in its own shape: refusals, overflow, paths that are not there, keys."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from forgemq_gateway.core.errors import context_overflow
from forgemq_gateway.protocols import PROTOCOLS
from tests.unit.gateway.talk import Talk, talk
from tests.unit.gateway.world import plain_http

LONG = "x " * 5000
BODIES: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": text}],
    },
    "/v1/responses": lambda text: {"input": text},
}
FIELD_OF_TEXT = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
}


def test_every_protocol_is_tried_here() -> None:
    assert {protocol.path for protocol in PROTOCOLS} == set(BODIES)


async def send(agent: Talk, path: str, body: Any, **headers: str) -> httpx.Response:
    async with plain_http() as client:
        url = f"{agent.world.base_url}{path}"
        return await client.post(url, json=body, headers=headers)


def check_shape(path: str, answer: httpx.Response) -> None:
    error = answer.json()["error"]
    if path.startswith("/v1/messages"):
        assert answer.json()["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}


async def test_refusals_have_the_shape_of_the_protocol_that_was_asked(model: Path) -> None:
    async with talk(model, lambda _: "x") as agent:
        for path, body in BODIES.items():
            key = {"x-api-key": agent.key}
            answers = {
                400: await send(agent, path, {"stream": "yes"}, **key),
                401: await send(agent, path, body("a")),
                404: await send(agent, f"{path}/nothing/there", {}, **key),
            }
            for status, answer in answers.items():
                assert answer.status_code == status, (path, answer.text)
                check_shape(path, answer)
        claude = {"anthropic-version": "2023-06-01"}
        check_shape("/v1/messages", await send(agent, "/v1/files", {}, **key, **claude))


async def test_every_way_to_send_the_key_opens_every_protocol(model: Path) -> None:
    async with talk(model, lambda _: "x") as agent:
        for path, body in BODIES.items():
            for headers in (
                {"authorization": f"Bearer {agent.key}"},
                {"x-api-key": agent.key},
                {"api-key": agent.key},
            ):
                assert (await send(agent, path, body("a"), **headers)).status_code == 200
            inside = await send(agent, f"/s/{agent.key}{path}", body("a"), authorization="Bearer x")
            assert inside.status_code == 200


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_a_context_that_does_not_fit_is_each_protocols_own_error(
    model: Path, path: str
) -> None:
    async with talk(model, lambda _: "x") as agent:
        answer = await agent.post(path, BODIES[path](LONG))
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long")
    else:
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == FIELD_OF_TEXT[path]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", sorted(BODIES))
async def test_every_answer_names_its_completion_in_a_header(
    model: Path, path: str, is_stream: bool
) -> None:
    async with talk(model, lambda _: "x") as agent:
        answer = await agent.post(path, {**BODIES[path]("a"), "stream": is_stream, "top_p": 0.5})
        (finished,) = await agent.finished()
    assert answer.headers["x-request-id"] == finished.request_id
    assert answer.headers["x-forgemq-unused"] == "top_p"


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.path)
def test_a_stream_that_overflows_ends_with_the_same_words(protocol: Any) -> None:
    request = protocol.read(json.dumps(BODIES[protocol.path]("a")).encode(), ())
    error = context_overflow(context_tokens=9, context_tokens_max=8)
    event = protocol.stream(request).fail(error)
    words = b"prompt is too long" if protocol.path == "/v1/messages" else b"context_length_exceeded"
    assert words in event
