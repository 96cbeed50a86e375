"""The whole service beside a real SGLang server, checked against plain transformers."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_inference.engine import Engine
from tests.lane_scene import LaneScene, create_topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CANCELLED = range(1, 7)
CONTEXT = [10, 20, 30, 40, 50, 60]
LOGPROB_TOLERANCE = 1e-3


async def scene_on(url: str, model: Path) -> LaneScene:
    log = MemoryLog(run="r")
    await create_topics(log)
    return LaneScene(log, model=model, engine_url=url)


def reference_logprobs(
    model: Path, context: list[int], output: list[int], *, temperature: float
) -> list[float]:
    """Log-probabilities of the output under plain transformers, float32."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(torch.tensor([context + output])).logits[0]
    rows = logits[len(context) - 1 : -1] / temperature
    chosen = torch.log_softmax(rows, -1).gather(1, torch.tensor(output)[:, None])
    return [float(value) for value in chosen[:, 0]]


async def test_logprobs_are_those_of_the_sampling_distribution_at_every_temperature(
    base_engine_url: str, engine_model: Path
) -> None:
    """Send all requests at once, so that they share batches in the engine."""
    temperatures = (1.0, 0.3, 0.7, 2.5, 0.0, 1.0)
    scene = await scene_on(base_engine_url, engine_model)
    async with scene.serving():
        await scene.report(is_serving=True)
        for number, temperature in enumerate(temperatures):
            context = [*CONTEXT, number]
            await scene.request(number, context, temperature=temperature, max_tokens=48)
        records = await scene.finished(count=len(temperatures), timeout_s=60)
    for record in records:
        number = int(record.request_id, 16)
        output = unpack_ids(record.output)
        assert record.finish_reason in ("stop", "length")
        assert record.temperature == temperatures[number]
        assert record.support == ("greedy" if record.temperature == 0 else "full")
        expected = reference_logprobs(
            engine_model, [*CONTEXT, number], output, temperature=record.temperature or 1.0
        )
        assert unpack_floats(record.logprobs) == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        assert (record.spans[0].start, record.spans[-1].end) == (0, len(output))


async def test_greedy_is_the_most_likely_token_and_a_delta_continues_it_exactly(
    base_engine_url: str, engine_model: Path
) -> None:
    scene = await scene_on(base_engine_url, engine_model)
    async with scene.serving():
        await scene.report(is_serving=True)
        await scene.request(1, CONTEXT, temperature=0.0, max_tokens=3)
        (parent,) = await scene.finished(count=1)
        output = unpack_ids(parent.output)
        shared = len(CONTEXT) + len(output)
        await scene.request(
            2, [70, 71], parent=1, shared=shared, is_delta=True, temperature=0.0, max_tokens=6
        )
        _, child = await scene.finished(count=2)
    policy = AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.float32)
    for context, record in (
        (CONTEXT, parent),
        ([*CONTEXT, *output, 70, 71], child),
    ):
        sampled = unpack_ids(record.output)
        with torch.no_grad():
            logits = policy(torch.tensor([context + sampled])).logits[0]
        assert logits[len(context) - 1 : -1].argmax(-1).tolist() == sampled
    assert child.cached_tokens > 0


async def test_a_stop_token_ends_the_output_and_is_part_of_it(
    base_engine_url: str, engine_model: Path
) -> None:
    scene = await scene_on(base_engine_url, engine_model)
    async with scene.serving():
        await scene.report(is_serving=True)
        await scene.request(1, CONTEXT, max_tokens=40, stop_token_ids=tuple(range(3, 704)))
        (record,) = await scene.finished(count=1)
    assert (record.finish_reason, len(unpack_ids(record.output))) == ("stop", 1)


async def test_truncated_support_is_recorded_for_what_it_is(
    base_engine_url: str, engine_model: Path
) -> None:
    scene = await scene_on(base_engine_url, engine_model)
    async with scene.serving():
        await scene.report(is_serving=True)
        await scene.request(1, CONTEXT, max_tokens=4, top_p=0.5)
        await scene.request(2, CONTEXT, max_tokens=4, top_k=5)
        await scene.request(3, CONTEXT, max_tokens=4, presence_penalty=0.5)
        records = await scene.finished(count=3)
    supports = {int(record.request_id, 16): record.support for record in records}
    assert supports == {1: "top_p", 2: "top_k", 3: "penalty"}


async def test_a_cancelled_generation_stops_in_the_engine(
    base_engine_url: str, engine_model: Path
) -> None:
    scene = await scene_on(base_engine_url, engine_model)
    async with scene.serving():
        await scene.report(is_serving=True)
        # Any one of them may sample its end before it is cancelled; all of them do not.
        for number in CANCELLED:
            await scene.request(number, [9, 8, 7], max_tokens=1000, temperature=10.0)
        await scene.until_running()
        await asyncio.sleep(0.2)
        for number in CANCELLED:
            await scene.cancel(number)
        records = await scene.finished(count=len(CANCELLED), timeout_s=10)
        outcomes = {(record.finish_reason, record.error) for record in records}
        assert ("abort", "cancelled") in outcomes
        assert outcomes <= {("abort", "cancelled"), ("stop", "")}
        await scene.request(99, [9, 8, 7], max_tokens=2)
        *_, after = await scene.finished(count=len(CANCELLED) + 1)
    assert after.error == ""
    assert after.engine_s < 5


async def test_requests_that_would_harm_the_engine_are_refused_and_it_lives(
    base_engine_url: str, engine_model: Path
) -> None:
    scene = await scene_on(base_engine_url, engine_model)
    async with scene.serving():
        report = await scene.report(is_serving=True)
        await scene.request(1, [10, 704])
        await scene.request(2, [10] * 1100)
        await scene.request(3, [])
        await scene.request(4, [10] * 1000, max_tokens=500)
        records = await scene.finished(count=4)
        assert (await scene.report(is_serving=True)).is_serving
    errors = {int(record.request_id, 16): record.error for record in records}
    assert errors == {
        1: "engine: a token id is outside the vocabulary of 704",
        2: "context_overflow: a context of 1100 tokens is over the engine's limit of 1018",
        3: "engine: the context is empty",
        4: "",
    }
    assert report.context_tokens_max == 1024


async def test_heartbeats_say_how_fast_the_engine_is_and_how_much_it_holds(
    base_engine_url: str, engine_model: Path
) -> None:
    scene = await scene_on(base_engine_url, engine_model)
    async with scene.serving():
        await scene.report(is_serving=True)
        for number in range(1, 5):
            context = [number + each for each in range(10, 60)] * 4
            await scene.request(number, context, temperature=1.0, max_tokens=24 * number)
        await scene.finished(count=4, timeout_s=60)
        load = await scene.until_measured(timeout_s=30)
    async with Engine(base_engine_url) as engine:
        info = await engine.server_info()
    assert load.capacity_tokens == info.max_total_num_tokens
    assert load.waiting_tokens == 0
    # A tiny model on a CPU: far from what a broken unit would give, in either direction.
    assert 10 < load.prefill_tokens_per_s < 1e6
    assert 1e-4 < load.step_s + load.step_added_s < 5


async def test_engine_and_service_report_the_same_limits(base_engine_url: str) -> None:
    async with Engine(base_engine_url) as engine:
        server = await engine.server_info()
        info = await engine.model_info()
    assert (server.max_total_num_tokens, server.max_req_input_len) == (40_000, 1018)
    assert (server.tp_size, info.weight_version) == (1, "0.0")
