"""Forms of replies through OpenAI's client, the gateway, the inference service and an engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forgemq_bus.blobs import BlobStore
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import StreamPolicy
from forgemq_contracts.run import StartedRun
from forgemq_contracts.speculation import Speculation
from forgemq_inference.app import main
from forgemq_shell.service import Context
from forgemq_telemetry import Telemetry
from tests.unit.gateway.scripted_lane import contexts_of, wall_ms
from tests.unit.gateway.world import World, configuration_of, partitions_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
COUNT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": COUNT}}
    for name in ("shelve", "unshelve")
]
NAMED: Any = {"type": "function", "function": {"name": "unshelve"}}


@asynccontextmanager
async def gateway_on(
    engine_url: str,
    model: Path,
    *,
    stream: StreamPolicy = "recorded",
    telemetry: Telemetry | None = None,
    speculation: Speculation | None = None,
) -> AsyncIterator[World]:
    """A gateway and one lane with this engine, on one log."""
    configuration = configuration_of(model, context_tokens_max=900)
    queue = msgspec.structs.replace(configuration.queues[0], stream=stream)
    configuration = msgspec.structs.replace(configuration, queues=(queue,), speculation=speculation)
    world = World(MemoryLog(run="r", clock_ms=wall_ms).open, configuration)
    world.telemetry = telemetry or world.telemetry
    await world.log.create_topics(partitions_of(configuration))
    stop = asyncio.Event()
    lane = {"LANE": 0, "ENGINE_URL": engine_url, "HEARTBEAT_S": 0.1, "DRAIN_S": 0.2}
    context = Context(
        started=StartedRun(run="r", configuration=configuration, blobs="memory://", started_ms=1),
        log=world.log,
        blobs=BlobStore("memory://blobs", run="r"),
        telemetry=Telemetry(service="inference"),
        stop=stop,
        environ={f"FORGEMQ_INFERENCE_{name}": str(value) for name, value in lane.items()},
    )
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(main(context))
        await world.start(tasks)
        try:
            yield world
        finally:
            for client in world.clients:
                await client.close()
            await world.stop()
            stop.set()
            await asyncio.wait([serving], timeout=20)
    await world.log.close()


async def test_the_engine_makes_the_forms_and_their_log_probabilities_are_of_what_they_allow(
    base_engine_url: str, engine_model: Path
) -> None:
    async with gateway_on(base_engine_url, engine_model) as world:
        chat = world.client(await world.episode()).chat.completions

        async def ask(**fields: Any) -> Any:
            answer = await chat.create(model="m", messages=HELLO, **fields)
            return answer.choices[0]

        required = await ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        named = await ask(tools=TOOLS, tool_choice=NAMED)
        schema = {"name": "count", "strict": True, "schema": COUNT}
        form = {"type": "json_schema", "json_schema": schema}
        typed = await ask(response_format=form)
        chosen = await ask(extra_body={"guided_choice": ["a", "b"]})
        with pytest.raises(openai.BadRequestError, match="parenthesis") as uncompiled:
            await ask(extra_body={"regex": "((("})
        free = await ask()
        records: list[Any] = await world.records(topics.FINISHED_COMPLETIONS)
    for choice, names in ((required, {"shelve", "unshelve"}), (named, {"unshelve"})):
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name in names
        assert 0 <= json.loads(call.function.arguments)["n"] <= 9
    assert list(json.loads(typed.message.content)) == ["n"]
    assert chosen.message.content in ("a", "b")
    assert uncompiled.value.code == "unsupported_constraint"
    assert free.finish_reason in ("stop", "length", "tool_calls")
    done = [record for record in records if not record.error]
    assert [record.support for record in done] == ["grammar"] * 4 + ["full"]
    check_masked_logprobs(engine_model, done[3], contexts_of(done), allowed=("a", "b"))


async def test_a_live_stream_of_an_engine_begins_before_its_record(
    base_engine_url: str, engine_model: Path
) -> None:
    """The deltas add up to the recorded answer, whose tokens have all their log-probabilities."""
    async with gateway_on(base_engine_url, engine_model, stream="live") as world:
        chat = world.client(await world.episode()).chat.completions
        texts, records_at_first = [], None
        # A free answer may be three tokens, which end before anybody could have read one.
        async for chunk in await chat.create(
            model="m",
            messages=HELLO,
            stream=True,
            max_tokens=400,
            extra_body={"regex": "[a-z ]{300}"},
        ):
            if text := chunk.choices[0].delta.content:
                texts.append(text)
                if records_at_first is None:
                    records_at_first = await world.records(topics.FINISHED_COMPLETIONS)
        (record,) = await world.records(topics.FINISHED_COMPLETIONS)
        chunks: list[Any] = await world.records(topics.SAMPLED_CHUNKS)
        (delivered,) = await world.records(topics.DELIVERED_COMPLETIONS)
        told = [token for chunk in chunks for token in unpack_ids(chunk.tokens)]
        whole = world.rendering.parse(unpack_ids(record.output), completion_id="c")
    assert records_at_first == []
    assert len(texts) > 1
    assert "".join(texts) == whole.content
    assert told == unpack_ids(record.output)[: len(told)]
    assert len(unpack_floats(record.logprobs)) == len(unpack_ids(record.output))
    assert (record.support, delivered.request_id) == ("grammar", record.request_id)


def check_masked_logprobs(
    model: Path,
    record: FinishedCompletion,
    contexts: dict[str, list[int]],
    *,
    allowed: tuple[str, ...],
) -> None:
    """The first is renormalised over the allowed tokens; the end, which is dictated, has 0."""
    output, logprobs = unpack_ids(record.output), unpack_floats(record.logprobs)
    context = contexts[record.request_id][: -len(output)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer.encode(text, add_special_tokens=False)[0] for text in allowed]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(torch.tensor([context])).logits[0, -1]
    masked = torch.log_softmax(logits[ids], -1)[ids.index(output[0])]
    assert logprobs == pytest.approx([float(masked), 0.0], abs=1e-3)
    assert float(masked) > float(torch.log_softmax(logits, -1)[output[0]]) + 0.1
