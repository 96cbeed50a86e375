"""Unexpected content in requests, sampled tokens and records does not end the gateway."""

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Emit, Record
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import dead_letters_of
from forgemq_contracts import topics
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.partitions import group_partition
from forgemq_telemetry.telemetry import Telemetry
from tests.lost_values import LosingStore, log_with, write_lost
from tests.unit.gateway.hindered_log import HinderedLog
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, Asked, wall_ms
from tests.unit.gateway.world import World, configuration_of, plain_http, running
from tests.unit.rendering.folders import APPENDING_TEMPLATE, write_model_folder

NO_UTF_8 = b"\x81\xaarequest_id\xa4\xff\xff\xff\xff"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def log_store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


def yes(_: Asked) -> str:
    return "yes"


async def asked(claim: Any, body: bytes) -> httpx.Response:
    async with plain_http(timeout_s=10) as client:
        return await client.post(
            f"{claim['base_url']}/chat/completions",
            content=body,
            headers={"x-api-key": claim["key"]},
        )


def echoing(arguments: str) -> bytes:
    """A request whose history has a call with these arguments."""
    call = {"id": "1", "function": {"name": "find", "arguments": arguments}}
    return json.dumps(
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO]}
    ).encode()


def offering(parameters: str) -> bytes:
    """A request with a tool of these parameters."""
    tool = f'{{"type": "function", "function": {{"name": "find", "parameters": {parameters}}}}}'
    return b'{"messages": [{"role": "user", "content": "a"}], "tools": [%s]}' % tool.encode()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (echoing('{"query": "\\ud800"}'), "messages"),
        (echoing("[" * 20_000 + "]" * 20_000), "messages"),
        (offering('{"q": %s}' % ("9" * 5000)), "tools[0][...][...][...]"),
        (offering("[" * 20_000 + "]" * 20_000), None),
    ],
    ids=["surrogate", "deep-arguments", "digits", "deep-tools"],
)
async def test_what_cannot_be_rendered_is_the_clients_error_and_the_next_request_is_served(
    model: Path, body: bytes, param: str | None
) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        claim = await world.episode()
        refused = await asked(claim, body)
        served = await asked(claim, json.dumps({"messages": HELLO}).encode())
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.json()["error"]["param"] == param
    assert served.json()["choices"][0]["message"]["content"] == "yes"


async def test_a_template_that_breaks_over_one_request_fails_that_turn_alone(
    tmp_path: Path,
) -> None:
    """The template divides by zero if there are three messages."""
    template = "{{- '' if 1 / (messages | length - 3) else '' }}" + APPENDING_TEMPLATE
    model = write_model_folder(tmp_path / "model", template=template)
    lines = io.StringIO()
    telemetry = Telemetry(service="gateway", stream=lines)
    configuration = configuration_of(model)
    async with running(log_store(), configuration, yes, telemetry=telemetry) as (world, _):
        claim = await world.episode()
        broken = await asked(claim, json.dumps({"messages": [*HELLO, *HELLO, *HELLO]}).encode())
        served = await asked(claim, json.dumps({"messages": HELLO}).encode())
    assert broken.status_code == 500
    assert broken.json()["error"] == {
        "message": "the turn could not be composed",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert served.status_code == 200
    events = [json.loads(line) for line in lines.getvalue().splitlines()]
    (failure,) = [event for event in events if event["event"] == "compose_failed"]
    assert failure["error"].startswith("ZeroDivisionError")
    assert "composer.py" in failure["traceback"]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "find", "arguments": {"a": "\\ud800"}}',
        '{"name": "f\\ud800", "arguments": {}}',
        '{"name": "find", "arguments": {"a": ' + "9" * 4400 + "}}",
    ],
    ids=["arguments", "name", "digits"],
)
async def test_a_sampled_call_that_cannot_be_encoded_is_text_before_and_after_a_restart(
    model: Path, call: str
) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    configuration = configuration_of(model, context_tokens_max=16_384)
    sampling = Sampling(temperature=1.0, max_tokens=8000)
    configuration = msgspec.structs.replace(
        configuration, episodes=msgspec.structs.replace(configuration.episodes, sampling=sampling)
    )
    opener = log_store()
    body = json.dumps({"messages": HELLO, "tools": [TOOL]}).encode()
    async with running(opener, configuration, lambda _: text) as (world, _):
        world_claim = await world.episode()
        answers = [await asked(world_claim, body)]
        await world.restart()
        here = {**world_claim, "base_url": f"{world.base_url}/v1"}
        answers.append(await asked(here, body))
    for answer in answers:
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert not message.get("tool_calls")
        assert message["content"] == text


async def dead_letters(world: World, topic: topics.Topic) -> list[Record]:
    reader = await world.log.reader({dead_letters_of(topic): 0})
    try:
        return await reader.read(timeout_s=0.1, records_max=100)
    finally:
        await reader.close()


async def write_bad(world: World, topic: topics.Topic, partition: int, *, key: bytes) -> int:
    emit = Emit(topic=topic.name, partition=partition, key=key, value=NO_UTF_8)
    if not topic.is_transactional:
        return await (await world.log.writer()).write(emit)
    writer = await world.log.transaction_writer("scheduler")
    end = (await world.log.end_positions([emit.place]))[emit.place]
    await writer.commit(outputs=[emit], group="scheduler", positions={})
    await writer.close()
    return end


async def test_bad_records_that_only_the_gateway_reads_have_one_dead_letter_each(
    model: Path,
) -> None:
    """The bad admission comes while it serves; a restart then reads all three."""
    opener = log_store()
    only_here = (topics.ADMITTED_GROUPS, topics.OPENED_EPISODES, topics.DELIVERED_COMPLETIONS)
    await opener().create_topics({topic.dlq_name: 1 for topic in only_here})
    async with running(opener, configuration_of(model), yes) as (world, _):
        offsets = [await write_bad(world, topic, 0, key=b"g-1") for topic in only_here]
        claim = await world.episode()  # Its admission comes after the bad record.
        live = [len(await dead_letters(world, topic)) for topic in only_here]
        await world.stop()
        await world.start_another()
        here = {**claim, "base_url": f"{world.base_url}/v1"}
        served = await asked(here, json.dumps({"messages": HELLO}).encode())
        restored = [await dead_letters(world, topic) for topic in only_here]
    assert live == [1, 0, 1]  # Episodes are read when a gateway gains them.
    assert [len(records) for records in restored] == [1, 1, 1]
    assert served.status_code == 200
    for topic, offset, records in zip(only_here, offsets, restored, strict=True):
        headers = dict(records[-1].headers)
        assert records[-1].value == NO_UTF_8
        assert (headers["topic"], headers["offset"]) == (
            topic.name.encode(),
            str(offset).encode(),
        )


@pytest.mark.slow
async def test_a_gateway_tries_until_the_log_takes_a_dead_letter_and_is_not_ready_meanwhile(
    model: Path,
) -> None:
    failures_left, lines = [3], io.StringIO()
    store = MemoryLog(run="r", clock_ms=wall_ms)
    topic = topics.ADMITTED_GROUPS
    await store.open().create_topics({topic.dlq_name: 1})

    async def fail(emit: Emit) -> None:
        if emit.topic == topic.dlq_name and failures_left[0]:
            failures_left[0] -= 1
            raise LogUnavailableError("no answer in time")

    telemetry = Telemetry(service="gateway", stream=lines)
    async with (
        running(
            lambda: HinderedLog(store.open(), fail),
            configuration_of(model),
            yes,
            telemetry=telemetry,
        ) as (world, _),
        plain_http() as client,
    ):
        await write_bad(world, topic, 0, key=b"g-1")
        await asyncio.sleep(0.5)
        health, live = (f"{world.base_url}{path}" for path in ("/health", "/live"))
        during = [(await client.get(url)).status_code for url in (health, live)]
        letters_during = len(await dead_letters(world, topic))
        await asyncio.sleep(10)
        after = (await client.get(health)).status_code
        claim = await world.episode()  # Its admission comes after the bad record.
        served = await asked(claim, json.dumps({"messages": HELLO}).encode())
        letters = len(await dead_letters(world, topic))
    failed = [line for line in lines.getvalue().splitlines() if '"dead_letter_failed"' in line]
    assert (during, letters_during) == ([503, 200], 0)
    assert (after, letters, len(failed)) == (200, 1, 3)
    assert served.status_code == 200


async def test_lost_values_end_no_gateway_and_each_of_its_own_has_one_dead_letter(
    model: Path, tmp_path: Path
) -> None:
    """They come while it serves; a restart reads them again."""
    store = LosingStore(tmp_path)
    opener = log_with(store, clock_ms=wall_ms).open
    lost = (topics.OPENED_EPISODES, topics.DELIVERED_COMPLETIONS, topics.FINISHED_COMPLETIONS)
    await opener().create_topics({topic.dlq_name: 1 for topic in lost})
    async with running(opener, configuration_of(model), yes) as (world, _):
        for topic in lost:
            emit = Emit(topic=topic.name, partition=0, key=b"g-1.0.0", value=b"x" * 99)
            await write_lost(opener(), store, emit)
        claim = await world.episode()
        body = json.dumps({"messages": HELLO}).encode()
        live = await asked(claim, body)
        for _ in range(2):
            await world.stop()
            await world.start_another()
        letters = [len(await dead_letters(world, topic)) for topic in lost]
    assert live.status_code == 200
    # A finished completion is the merger's to write.
    assert letters == [1, 1, 0]


async def test_a_turn_whose_completion_does_not_decode_ends_with_its_group(model: Path) -> None:
    """The test acts as the merger (dead letter) and as the scheduler (retirement)."""

    async def script(_: Asked) -> str:
        await asyncio.sleep(30)
        return "late"

    async with running(log_store(), configuration_of(model), script) as (world, lanes):
        claim = await world.episode()
        answering = asyncio.ensure_future(asked(claim, json.dumps({"messages": HELLO}).encode()))
        await lanes[0].has_seen(1)
        record = lanes[0].seen[0].record
        partition = group_partition(record.group_id, partitions=GROUP_PARTITIONS)
        await write_bad(
            world, topics.FINISHED_COMPLETIONS, partition, key=record.request_id.encode()
        )
        await world.retire(record.group_id)
        answer = await asyncio.wait_for(answering, timeout=8)
        cancelled = await world.eventually(topics.CANCELLED_COMPLETIONS, 1)
    assert (answer.status_code, answer.json()["error"]["type"]) == (410, "gone_error")
    assert [(one.request_id, one.group_id) for one in cancelled] == [
        (record.request_id, record.group_id)
    ]


SPOILED: dict[str, dict[str, Any]] = {
    "torn-context": {"context": b"abc"},
    "negative-token": {"output": b"\xff\xff\xff\xff"},
    "few-logprobs": {"logprobs": b""},
    "not-a-number": {"logprobs": b"\x00\x00\xc0\x7f"},
    "endless-span": {"spans": [{"start": 0, "end": 2**60, "lineage": 1, "version": 0}]},
    "no-parent": {"shared_prefix_tokens": 9},
    "no-json": {"turn": {"tools": b"[", "tools_digest": "t"}},
    "endless-index": {"episode_id": "g-1." + "9" * 5000 + ".0"},
    "far-token": {"output": b"\xff\xff\xff\x7f", "logprobs": b"\x00\x00\x00\x00"},
}


@pytest.mark.parametrize("changes", SPOILED.values(), ids=SPOILED)
async def test_a_completion_that_breaks_a_rule_ends_no_gateway(
    model: Path, changes: dict[str, Any]
) -> None:
    """The record comes while it serves, and a restart reads it again."""
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        claim = await world.episode()
        fields = {
            "request_id": "0" * 32,
            "attempt": 0,
            "episode_id": claim["episode_id"],
            "group_id": claim["group_id"],
            "lane": 0,
            "epoch": 1,
            "finish_reason": "stop",
            "output": b"\x01\x00\x00\x00",
            "logprobs": b"\x00\x00\x00\x00",
        } | changes
        turn = {"sequence": 0, "protocol": "chat_completions", "body_digest": "d"}
        fields["turn"] = turn | changes.get("turn", {})
        partition = group_partition(claim["group_id"], partitions=GROUP_PARTITIONS)
        emit = Emit(
            topic=topics.FINISHED_COMPLETIONS.name,
            partition=partition,
            key=b"0" * 32,
            value=msgspec.msgpack.encode(fields),
        )
        await (await world.log.writer()).write(emit)
        answers = [await asked(claim, json.dumps({"messages": HELLO}).encode())]
        await world.stop()
        await world.start_another()
        here = {**claim, "base_url": f"{world.base_url}/v1"}
        answers.append(await asked(here, json.dumps({"messages": [*HELLO, *HELLO]}).encode()))
    assert [answer.status_code for answer in answers] == [200, 200]
