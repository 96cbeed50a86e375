"""Any HTTP body is answered with 200 or a 4xx in the protocol's shape, and loses nothing."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgemq_bus.memory import MemoryLog
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.history import History
from forgemq_gateway.protocols.chat_completions import ChatCompletions
from forgemq_gateway.protocols.completions import Completions
from forgemq_gateway.protocols.messages import Messages
from forgemq_gateway.protocols.responses import Responses
from forgemq_gateway.wire_protocol import WireProtocol
from tests.fuzz.sound import (
    GROUP,
    HELLO,
    SOUND,
    SOUND_COMPLETION,
    SOUND_MESSAGES,
    SOUND_RESPONSE,
    changed,
    paths,
)
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.served import Served, serving
from tests.unit.gateway.world import configuration_of

COUNT_PATH = "/v1/messages/count_tokens"

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    """One gateway for all examples, so an example that breaks it breaks the later ones."""
    with serving(MemoryLog(run="r", clock_ms=wall_ms).open, configuration_of(model)) as gateway:
        yield gateway


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**63, max_value=2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from(["", "assistant", "tool", "king", "auto", "function", "c1", "\ud800"])
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "function", "name", "id", "text", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def bodies(sound: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """The sound body with junk somewhere in it, as JSON or torn."""
    spoiled = st.builds(
        lambda path, junk: changed(sound, path, junk),
        st.sampled_from(list(paths(sound))[1:]),
        JUNK,
    ) | st.builds(
        lambda name, junk: {**sound, name: junk},
        st.sampled_from(["n", "top_logprobs", "stream_options", "seed", "response_format", "x"]),
        JUNK,
    )
    text = spoiled.map(lambda value: json.dumps(value).encode())
    torn = st.builds(
        lambda body, at, byte: body[: at % len(body)] + byte + body[at % len(body) + 1 :],
        text,
        st.integers(min_value=0, max_value=10_000),
        st.binary(max_size=2),
    )
    return text | torn | st.binary(max_size=40)


def check(answer: httpx.Response) -> None:
    """200, or a refusal that says what is wrong in the protocol's shape."""
    if answer.status_code in (200, 204):
        return
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"].endswith("_error")


@pytest.mark.slow
def test_with_any_one_byte_changed_a_chat_request_is_read_or_refused_with_400():
    sound = json.dumps(SOUND).encode()
    statuses = set()
    for index, byte in itertools.product(range(len(sound)), range(256)):
        try:
            ChatCompletions().read(sound[:index] + bytes([byte]) + sound[index + 1 :], History())
        except RefusedError as error:
            statuses.add(error.status)
    assert statuses == {400}


@pytest.mark.slow
@FUZZ
@given(body=bodies(SOUND))
def test_a_chat_request_is_served_or_refused_and_the_next_is_served(
    served: Served, body: bytes
) -> None:
    check(served.chat(body))
    assert served.group()["state"] == "admitted"
    answer = served.chat(json.dumps({"messages": [HELLO]}).encode())
    assert answer.json()["choices"][0]["message"]["content"] == "yes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "sound"),
    [
        (Messages(), SOUND_MESSAGES),
        (Responses(), SOUND_RESPONSE),
        (Completions(), SOUND_COMPLETION),
    ],
)
def test_with_any_one_byte_changed_a_request_is_read_or_refused_with_4xx(
    protocol: WireProtocol, sound: Any
) -> None:
    body = json.dumps(sound).encode()
    statuses = set()
    for index, byte in itertools.product(range(len(body)), range(0, 256, 5)):
        try:
            protocol.read(body[:index] + bytes([byte]) + body[index + 1 :], History())
        except RefusedError as error:
            statuses.add(error.status)
    assert statuses <= {400, 404}


@FUZZ
@given(body=bodies(SOUND_MESSAGES), path=st.sampled_from(["/v1/messages", COUNT_PATH]))
def test_messages_are_served_counted_or_refused_and_the_next_is_served(
    served: Served, body: bytes, path: str
) -> None:
    answer = served.post(body, path=path)
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["type"] == "error"
        assert set(answer.json()["error"]) == {"type", "message"}
    following = served.post(json.dumps({"messages": [HELLO]}).encode(), path="/v1/messages")
    assert following.json()["content"] == [{"type": "text", "text": "yes"}]


@pytest.mark.slow
@FUZZ
@given(body=bodies(SOUND_RESPONSE), path=st.sampled_from(["", "/input_tokens"]))
def test_a_response_is_made_counted_or_refused_and_the_next_is_served(
    served: Served, body: bytes, path: str
) -> None:
    check(served.post(body, path=f"/v1/responses{path}"))
    following = served.post(b'{"input": "hello"}', path="/v1/responses")
    assert following.json()["output"][0]["content"][0]["text"] == "yes"


@FUZZ
@given(body=bodies(SOUND_COMPLETION) | bodies({**SOUND_COMPLETION, "prompt": ["a", "b"]}))
def test_a_completion_is_made_or_refused_and_the_next_is_served(
    served: Served, body: bytes
) -> None:
    check(served.post(body, path="/v1/completions"))
    following = served.post(b'{"prompt": "hello"}', path="/v1/completions")
    assert following.json()["choices"][0]["text"] == "yes"


@FUZZ
@given(body=bodies(GROUP))
def test_a_group_request_is_served_or_refused(served: Served, body: bytes) -> None:
    answer = served.admin("/v1/groups", body)
    check(answer)
    if answer.status_code == 200:
        claim = served.admin(f"/v1/groups/{answer.json()['group_id']}/claim", b"")
        assert claim.status_code in (200, 204)


@FUZZ
@given(
    route=st.sampled_from(["groups/g-unknown/claim", "episodes/{episode}/rewards"]),
    body=bodies({"wait_s": 0, "reward_id": "r", "name": "n", "value": 1.0, "completion_id": None}),
)
def test_a_request_about_an_episode_is_served_or_refused(
    served: Served, route: str, body: bytes
) -> None:
    path = route.format(episode=served.episode_id)
    check(served.admin(f"/v1/{path}", body))
    assert served.group()["state"] == "admitted"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', None),
        (b'{"messages": [{"role": "user", "content": "a"}], "stream": "yes"}', "stream"),
        (
            b'{"messages": [{"role": "user", "content": "a"}], "stream_options": 3}',
            "stream_options",
        ),
        (b'{"messages": [{"role": "user", "content": "a"}], "seed": "\xff"}', None),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "messages[0].tool_calls[0]"),
    ],
)
def test_the_field_that_is_wrong_is_named(served: Served, body: bytes, param: str | None) -> None:
    answer = served.chat(body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"].startswith(param)


@pytest.mark.parametrize(("size", "status"), [(3_000_000, 400), (10_000_000, 413)])
def test_a_prompt_of_megabytes_is_too_long_and_others_are_served(
    served: Served, size: int, status: int
) -> None:
    long = {**HELLO, "content": "x" * size}
    answer = served.chat(json.dumps({"messages": [long]}).encode())
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert served.chat(json.dumps({"messages": [HELLO]}).encode()).status_code == 200


def test_a_task_that_is_not_text_is_refused(served: Served) -> None:
    """The gateway keeps a task as it came, so otherwise its agent would be the first to notice."""
    body = b'{"domain": "shop", "idempotency_key": "u", "task": "\xff"}'
    answer = served.admin("/v1/groups", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
