"""`Episode` as a user's agent calls it, and its requests while the gateway fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext

import aiohttp
import aiohttp.test_utils
import pytest
from msgspec import Raw

from forgemq_agents.completion import Completion, FunctionCall
from forgemq_agents.episode import Episode
from forgemq_agents.errors import ContextFullError, EpisodeOverError, GatewayError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_agents.tool_loop import Append, Stop, answer_calls, run_tool_loop
from forgemq_contracts.admin import Claim, GroupRequest
from forgemq_telemetry import Telemetry
from tests.memory_gateway import MemoryGateway
from tests.memory_gateway_http import ADMIN_KEY, app_of

ENVIRON = {"A": "b", "FORGEMQ_AGENTS_ADMIN_KEY": "secret", "FORGEMQ_KAFKA": "broker:9092"}
ASKED = [{"role": "user", "content": "hello"}]

SILENT = Telemetry(service="agents")


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def opened(memory_gateway, http):
    """(a gateway, an episode of it, seconds of each wait between two attempts)."""
    server = await memory_gateway()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    requests = JsonRequests(http, retry=Retry(deadline_s=60), sleep=sleep)
    return server, await opened_episode(server, requests), waits


async def opened_episode(server: MemoryGateway, requests: JsonRequests) -> Episode:
    gateway = GatewayClient(requests, url=server.url, admin_key=ADMIN_KEY)
    group = await gateway.request_group(
        GroupRequest(domain="count", idempotency_key="count/0", task=Raw(b'{"k":0}'))
    )
    claim = await gateway.claim(group.group_id)
    assert claim is not None
    return Episode(claim, gateway=gateway, requests=requests, environ=ENVIRON, telemetry=SILENT)


async def test_the_environment_of_an_agent_has_no_variable_of_forgemq(opened):
    _, episode, _ = opened
    assert episode.environ == {"A": "b"}


async def test_chat_sends_the_key_of_the_episode(opened):
    _, episode, _ = opened
    completion = await episode.chat(ASKED)
    assert completion.text == f"{episode.key} speaking"
    assert completion.completion_id == "a" * 32


async def test_a_retry_sends_the_same_bytes(opened, refusal):
    server, episode, waits = opened
    server.answers = [
        refusal(429, "slow down", Retry_After="3"),
        refusal(500, "oh"),
        refusal(503, "oh", Retry_After="not a number"),
    ]
    await episode.chat(ASKED, tools=[{"type": "function", "function": {"name": "f"}}])
    assert len(server.chats) == 4
    assert len(set(server.chats)) == 1
    assert waits == [3.0, 0.4, 0.8]


async def test_a_full_context_raises_its_own_error_and_is_not_retried(opened, refusal):
    server, episode, _ = opened
    server.answers = [refusal(400, "too long", code="context_length_exceeded")]
    with pytest.raises(ContextFullError):
        await episode.chat(ASKED)
    assert len(server.chats) == 1


@pytest.mark.parametrize("status", [404, 409, 410])
async def test_a_request_for_an_episode_that_is_over_raises(opened, refusal, status):
    server, episode, _ = opened
    server.answers = [refusal(status, "over")]
    with pytest.raises(EpisodeOverError) as caught:
        await episode.chat(ASKED)
    assert caught.value.status == status


async def test_any_other_refusal_is_raised_with_its_message(opened, refusal):
    server, episode, _ = opened
    server.answers = [refusal(422, "temperature must be a number")]
    with pytest.raises(GatewayError, match="temperature must be a number"):
        await episode.chat(ASKED)


async def test_retries_end_at_the_deadline(http, memory_gateway, refusal):
    server = await memory_gateway()
    server.answers = [refusal(429, "busy", Retry_After="100")]
    requests = JsonRequests(http, retry=Retry(deadline_s=5))
    with pytest.raises(GatewayError, match="busy"):
        await requests.send("POST", f"{server.url}/v1/chat/completions", key="k", fields={})
    assert len(server.chats) == 1


async def test_a_gateway_that_is_away_is_asked_again_until_it_is_back(http, memory_gateway):
    server = await memory_gateway()
    attempts = 0
    dead = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = dead.sockets[0].getsockname()[1]

    async def sleep(_: float) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            dead.close()
            await dead.wait_closed()
            server_back = aiohttp.web.AppRunner(app_of(server))
            await server_back.setup()
            await aiohttp.web.TCPSite(server_back, "127.0.0.1", port).start()
            runners.append(server_back)

    runners: list[aiohttp.web.AppRunner] = []
    requests = JsonRequests(http, retry=Retry(), sleep=sleep)
    reply = await requests.send("GET", f"http://127.0.0.1:{port}/v1/run", key=ADMIN_KEY)
    assert reply.status == 200
    assert attempts >= 2
    await runners[0].cleanup()


@pytest.mark.parametrize("is_served", [True, False], ids=["served", "stuck"])
async def test_a_turn_beyond_the_limit_of_its_key_waits_while_others_are_answered(
    http, memory_gateway, refusal, is_served
):
    server, clock = await memory_gateway(), Clock()

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        if is_served:
            await requests.send("GET", f"{server.url}/v1/run", key=ADMIN_KEY, is_turn=True)

    requests = JsonRequests(http, retry=Retry(), sleep=sleep, clock_s=clock)
    episode = await opened_episode(server, requests)
    server.answers = [refusal(429, "64 requests open", Retry_After="1") for _ in range(800)]
    with nullcontext() if is_served else pytest.raises(GatewayError, match="64 requests open"):
        await episode.chat(ASKED)
    assert clock.now_s == (800.0 if is_served else 300.0)


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def __call__(self) -> float:
        return self.now_s


async def cutting(clock: Clock, *, held_s: float, cuts: int) -> aiohttp.test_utils.TestServer:
    """A gateway that holds each of the first `cuts` requests, then cuts its connection."""
    asked = 0

    async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
        nonlocal asked
        asked += 1
        if asked <= cuts:
            clock.now_s += held_s
            assert request.transport is not None
            request.transport.abort()
        return aiohttp.web.json_response({"asked": asked})

    app = aiohttp.web.Application()
    app.add_routes([aiohttp.web.post("/turn", answer)])
    server = aiohttp.test_utils.TestServer(app)
    await server.start_server()
    return server


async def test_a_completion_slower_than_the_deadline_is_asked_again_if_its_gateway_dies(http):
    clock = Clock()
    server = await cutting(clock, held_s=400.0, cuts=3)
    requests = JsonRequests(http, retry=Retry(), sleep=clock.sleep, clock_s=clock)
    reply = await requests.send("POST", str(server.make_url("/turn")), key="k", fields={})
    assert reply.body == b'{"asked": 4}'
    assert 1200 < clock.now_s < 1202
    await server.close()


async def test_requests_that_are_all_cut_at_once_end_at_the_deadline(http):
    clock = Clock()
    server = await cutting(clock, held_s=1.0, cuts=1_000)
    requests = JsonRequests(http, retry=Retry(), sleep=clock.sleep, clock_s=clock)
    with pytest.raises(GatewayError, match="ServerDisconnectedError"):
        await requests.send("POST", str(server.make_url("/turn")), key="k", fields={})
    assert 290 < clock.now_s <= 301
    await server.close()


async def test_a_reward_is_reported_under_an_id_that_a_retry_repeats(opened):
    server, episode, _ = opened
    completion = await episode.chat(ASKED)
    await episode.report_reward("style", 0.5, completion=completion)
    await episode.report_reward("style", 0.5, completion=completion)
    await episode.report_reward("style", 0.25)
    first, again, whole = server.rewards
    assert first.reward_id == again.reward_id != whole.reward_id
    assert first.completion_id == "a" * 32
    assert whole.completion_id is None


def completion_with(arguments: object, *, content: str | None = None) -> Completion:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    return Completion(id="chatcmpl-0", message=message, finish_reason="tool_calls")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("[1]", None), ('{"a"', None), ("", None)],
)
def test_arguments_are_an_object_or_none(arguments, expected):
    assert completion_with(arguments).calls == (
        FunctionCall(id="c1", name="f", arguments=expected),
    )


async def test_calls_of_one_turn_run_at_the_same_time():
    together = asyncio.Barrier(3)

    async def meet(arguments) -> str:
        await asyncio.wait_for(together.wait(), 5)
        return f"met {arguments['n']}"

    calls = [FunctionCall(id=str(n), name="meet", arguments={"n": n}) for n in range(3)]
    odd = [
        FunctionCall(id="x", name="none", arguments={}),
        FunctionCall(id="y", name="meet", arguments=None),
    ]
    answers = await answer_calls([*calls, *odd], {"meet": meet}, bad_call="bad")
    assert [answer["content"] for answer in answers] == ["met 0", "met 1", "met 2", "bad", "bad"]
    assert [answer["tool_call_id"] for answer in answers] == ["0", "1", "2", "x", "y"]


async def test_a_call_that_fails_ends_those_beside_it():
    """The episode is over, so nothing may go on acting for it."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(arguments) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ""

    async def fail(arguments) -> str:
        await begun.wait()
        raise RuntimeError("no disk")

    calls = [FunctionCall(id=name, name=name, arguments={}) for name in ("wait", "fail")]
    with pytest.raises(RuntimeError, match="no disk"):
        await answer_calls(calls, {"wait": wait, "fail": fail}, bad_call="bad")
    await asyncio.wait_for(cancelled.wait(), 5)


def test_arguments_that_are_nested_too_deep_are_no_object():
    """An error would mask the episode of a policy that repeats a bracket."""
    function = {"name": "read", "arguments": '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    (call,) = Completion(id="c", message=message, finish_reason="stop").calls
    assert call.arguments is None


async def test_the_loop_appends_the_message_unchanged():
    heard: list[list[dict]] = []

    class Model:
        context_tokens_max = 0

        async def chat(self, messages, *, tools=(), cuts=()) -> Completion:
            heard.append(list(messages))
            return completion_with("{}", content="odd  text ")

        def truncate(self, cause) -> None:
            raise AssertionError(f"no limit ended it, least of all {cause}")

    class Once:
        tools = ()

        def opening(self):
            return ASKED

        async def answer(self, completion):
            if len(heard) == 2:
                return Stop("done")
            return Append([{"role": "tool", "tool_call_id": "c1", "content": "x"}])

    assert await run_tool_loop(Model(), Once(), turns_max=5) == "done"
    assert heard[1] == [
        *ASKED,
        completion_with("{}", content="odd  text ").message,
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]


def test_a_claim_hides_nothing_the_agent_needs():
    assert set(Claim.__struct_fields__) >= {"key", "base_url", "session_url", "task", "temperature"}
