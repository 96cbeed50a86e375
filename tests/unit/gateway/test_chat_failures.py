"""Chat completions when input is bad, engines fail, or the client goes away."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.scripted_lane import Asked, FailAttempt, wall_ms
from tests.unit.gateway.world import configuration_of, plain_http, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def log_store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


def say(text: str) -> Callable[[Asked], str]:
    return lambda asked: text


async def test_a_client_that_goes_away_cancels_its_request(model: Path) -> None:
    async def never(asked: Asked) -> str:
        await asyncio.sleep(30)
        return "late"

    async with running(log_store(), configuration_of(model), never) as (world, lanes):
        client = world.client(await world.episode())
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(
                model="m", messages=HELLO
            )
        cancelled = await world.eventually(topics.CANCELLED_COMPLETIONS, 1)
        delivered = await world.records(topics.DELIVERED_COMPLETIONS)
        assert [(c.request_id, c.attempt, c.lane) for c in cancelled] == [
            (lanes[0].seen[0].record.request_id, 0, 0)
        ]
        assert delivered == []


async def test_a_retry_after_a_cut_continues_the_same_request(model: Path) -> None:
    release = asyncio.Event()

    async def wait(asked: Asked) -> str:
        await release.wait()
        return "yes"

    async with running(log_store(), configuration_of(model), wait) as (world, lanes):
        client = world.client(await world.episode())
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(
                model="m", messages=HELLO, stream=True
            )
        release.set()
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        finished = await world.records(topics.FINISHED_COMPLETIONS)
    assert answer.choices[0].message.content == "yes"
    assert {f"chatcmpl-{asked.record.request_id}" for asked in lanes[0].seen} == {answer.id}
    assert finished[0].request_id == lanes[0].seen[0].record.request_id


@pytest.mark.slow
async def test_an_engine_that_fails_twice_only_delays_the_client(model: Path) -> None:
    def script(asked: Asked) -> str:
        if asked.record.attempt < 2:
            raise FailAttempt("engine: out of memory")
        return "yes"

    async with running(log_store(), configuration_of(model), script) as (world, lanes):
        client = world.client(await world.episode())
        answer = await client.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.content == "yes"
    assert [asked.record.attempt for asked in lanes[0].seen] == [0, 1, 2]
    assert len({asked.record.request_id for asked in lanes[0].seen}) == 1


async def broken(asked: Asked) -> str:
    await asyncio.sleep(0.2)
    raise FailAttempt("engine: broken")


@pytest.mark.slow
async def test_an_engine_that_always_fails_is_a_server_error_and_then_left_alone(
    model: Path,
) -> None:
    async with running(log_store(), configuration_of(model), broken) as (world, lanes):
        client = world.client(await world.episode())
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=HELLO)
        assert caught.value.status_code == 503
        with pytest.raises(openai.RateLimitError, match=r"engines of all live lanes fail .*: 0"):
            await client.chat.completions.create(model="m", messages=[*HELLO, *HELLO])
    assert len(lanes[0].seen) == 3


@pytest.mark.slow
async def test_an_engine_that_always_fails_is_an_error_event_of_a_stream(model: Path) -> None:
    async with running(log_store(), configuration_of(model), broken) as (world, _):
        client = world.client(await world.episode())
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="broken"):
            await anext(chunk async for chunk in stream if chunk.choices[0].delta.content)


@pytest.mark.slow
async def test_a_client_with_its_default_retries_survives_an_engine_that_fails_for_ten_seconds(
    model: Path,
) -> None:
    begun_s = asyncio.get_running_loop().time()

    def script(asked: Asked) -> str:
        if asyncio.get_running_loop().time() < begun_s + 10:
            raise FailAttempt("engine: restarting")
        return "yes"

    async with running(log_store(), configuration_of(model), script) as (world, lanes):
        client = world.client(await world.episode()).with_options(max_retries=2)
        answer = await client.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.content == "yes"
    assert len(lanes[0].seen) <= 9


async def test_a_context_that_only_the_engine_finds_too_long_is_the_clients_error_at_once(
    model: Path,
) -> None:
    def script(asked: Asked) -> str:
        raise FailAttempt(f"{len(asked.context)} tokens", failure="context_overflow")

    async with running(log_store(), configuration_of(model), script) as (world, lanes):
        client = world.client(await world.episode())
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=HELLO)
    assert caught.value.code == "context_length_exceeded"
    assert len(lanes[0].seen) == 1


async def test_a_lane_behind_the_version_of_a_groups_admission_gets_none_of_its_requests(
    model: Path,
) -> None:
    """The scheduler may have given a silent lane up that looks live to the gateway."""
    async with running(log_store(), configuration_of(model), say("x"), lanes=2) as (world, lanes):
        lanes[1].version = 1
        await lanes[1].report()
        client = world.client(await world.claim(await world.open_group(version=1)))
        await client.chat.completions.create(model="m", messages=HELLO)
    assert [len(lane.seen) for lane in lanes] == [0, 1]


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_a_dead_lanes_requests_go_to_another_with_all_their_tokens(model: Path) -> None:
    hold = asyncio.Event()

    async def script(asked: Asked) -> str:
        if "second" in asked.text and asked.record.lane == 0:
            await hold.wait()
        return "yes"

    async with running(log_store(), configuration_of(model), script, lanes=2) as (world, lanes):
        client = world.client(await world.episode())
        await client.chat.completions.create(model="m", messages=HELLO)
        history: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "second"},
        ]
        asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=history))
        await lanes[0].has_seen(2)
        lanes[0].is_silent = True
        answer = await asyncio.wait_for(asking, timeout=10)
    assert answer.choices[0].message.content == "yes"
    moved = lanes[1].seen[0].record
    assert (moved.attempt, moved.is_delta) == (1, False)
    assert lanes[1].seen[0].context == lanes[0].seen[1].context


async def test_a_lane_that_lost_the_parent_gets_the_whole_context(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("yes")) as (world, lanes):
        client = world.client(await world.episode())
        await client.chat.completions.create(model="m", messages=HELLO)
        lanes[0].known.clear()
        history: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "second"},
        ]
        await client.chat.completions.create(model="m", messages=history)
    last = lanes[0].seen[-1]
    assert (last.record.attempt, last.record.is_delta) == (1, False)
    assert last.text.startswith("<|im_start|>user\nhello")


async def test_without_a_lane_the_answer_is_429_with_retry_after(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("x"), lanes=0) as (world, _):
        client = world.client(await world.episode())
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="m", messages=HELLO)
        assert caught.value.response.headers["retry-after"] == "1"
        assert await world.records(topics.REQUESTED_COMPLETIONS) == []


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        (b"{", None, 400),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', None, 400),
        (b'{"messages": ' + b"[" * 3000, None, 400),
        (b'{"messages": []}', "messages", 400),
        (b'{"model": "m"}', "messages", 400),
        (b'{"messages": [{"role": "king", "content": "a"}]}', "messages[0].role", 400),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content", 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 17}', "n", 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}', "max_tokens", 400),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "messages[0].content[0].type",
            400,
        ),
        (
            b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}',
            "top_logprobs",
            400,
        ),
    ],
)
async def test_bad_input_is_refused_naming_the_field(
    model: Path, body: bytes, param: str | None, status: int
) -> None:
    async with running(log_store(), configuration_of(model), say("x")) as (world, _):
        claim = await world.episode()
        async with plain_http() as client:
            answer = await client.post(
                f"{claim['base_url']}/chat/completions",
                content=body,
                headers={"x-api-key": claim["key"]},
            )
        assert await world.records(topics.REQUESTED_COMPLETIONS) == []
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


async def test_keys_open_only_what_is_theirs(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("x")) as (world, _):
        claim = await world.episode()
        forged = claim["key"][:-1] + ("0" if claim["key"][-1] != "0" else "1")
        with pytest.raises(openai.AuthenticationError):
            await world.client({**claim, "key": forged}).models.list()
        answer = await world.admin("GET", "/v1/run", key=claim["key"])
        assert answer.status_code == 404
        answer = await world.admin("GET", "/v1/run", key="wrong")
        assert answer.status_code == 401
        assert [m.id async for m in world.client(claim).models.list()] == ["policy"]
        async with plain_http() as client:
            assert (await client.head(world.base_url + "/")).status_code == 200


async def test_a_body_over_the_limit_is_refused_while_it_is_read(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("x")) as (world, _):
        claim = await world.episode()

        async def endless() -> Any:
            for _ in range(65):
                yield b" " * (1024 * 1024)

        async with plain_http(timeout_s=30) as client:
            answer = await client.post(
                f"{claim['base_url']}/chat/completions",
                content=endless(),
                headers={"x-api-key": claim["key"]},
            )
    assert answer.status_code == 413


async def test_an_episode_that_ends_while_a_body_is_read_is_refused(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("x")) as (world, lanes):
        claim = await world.episode()

        async def body() -> Any:
            yield b'{"messages": '
            await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {})
            yield b'[{"role": "user", "content": "hello"}]}'

        async with plain_http() as client:
            answer = await client.post(
                f"{claim['base_url']}/chat/completions",
                content=body(),
                headers={"x-api-key": claim["key"]},
            )
    assert answer.status_code == 409
    assert lanes[0].seen == []


def refuse_long(asked: Asked) -> str:
    if len(asked.context) > 200:
        raise FailAttempt("too long", failure="context_overflow")
    return "yes"


LONG = [{"role": "user", "content": "hello " * 400}]


CASES: list[tuple[tuple[Any, ...], str, dict[str, Any], tuple[str, str | None]]] = [
    ((HELLO, LONG), "finish", {}, ("completed", "context_full")),
    ((HELLO, LONG), "abort", {"detail": "crashed"}, ("completed", "context_full")),
    ((HELLO, LONG), "finish", {"truncated_by": None}, ("completed", None)),
    ((HELLO, LONG), "abort", {"truncated_by": None}, ("aborted", None)),
    ((LONG, HELLO), "finish", {}, ("completed", None)),
    ((LONG, HELLO), "abort", {}, ("aborted", None)),
    ((HELLO,), "finish", {"truncated_by": "too_many_turns"}, ("completed", "too_many_turns")),
    (
        (HELLO,),
        "finish",
        {"truncated_by": "declared", "detail": "failed on half a plan"},
        ("completed", "declared"),
    ),
]


async def test_an_episode_whose_newest_request_overflowed_its_context_ends_truncated(
    model: Path,
) -> None:
    ended = {}
    async with running(log_store(), configuration_of(model), refuse_long) as (world, _):
        for number, (asked, end, body, _) in enumerate(CASES):
            claim = await world.claim(await world.open_group(f"k{number}"))
            client = world.client(claim)
            for messages in asked:
                with suppress(openai.BadRequestError):
                    await client.chat.completions.create(model="m", messages=messages)
            answer = await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/{end}", body)
            assert answer.status_code == 200, answer.text
            ended[claim["episode_id"]] = number
        finished = await world.records(topics.FINISHED_EPISODES)
    found = {ended[one.episode_id]: (one.status, one.truncated_by) for one in finished}
    assert [found[number] for number in range(len(CASES))] == [case[-1] for case in CASES]
    assert {one.detail for one in finished} == {"", "crashed", "failed on half a plan"}


async def test_a_limit_that_no_contract_names_is_refused_with_those_that_are(model: Path) -> None:
    async with running(log_store(), configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}/finish"
        answer = await world.admin("POST", path, {"truncated_by": "boredom"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "truncated_by"
    assert "one of context_full, declared, out_of_time" in answer.json()["error"]["message"]
