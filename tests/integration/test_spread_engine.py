"""Engines of several processes, on a CPU: all of them get the new weights, or the load has failed.

The processes stand for GPUs: SGLang splits heads, experts and requests between them as it does
there.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.weights import RelayedLane, SampledParameter
from forgemq_inference.engine import Engine
from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.server import EngineServer
from forgemq_trainer.samples import sampled_parameters
from tests.engine_fixture import (
    ENGINE_MODEL,
    engine_options,
    reset_engine,
    started_engine,
)
from tests.integration.test_cached_tokens import GROUPS, SIBLINGS, TURNS, play
from tests.integration.test_expert_routes import mixture
from tests.integration.test_quantised_engine import check_rounded, in_blocks, serving_fp8
from tests.integration.test_read_back_engine import KEY, spoiled
from tests.integration.test_reply_forms_engine import gateway_on
from tests.integration.test_weights_engine import (
    CONTEXT,
    logprobs,
    perturbed,
    publisher,
    sending,
    spans,
)
from tests.lane_scene import LaneScene, create_topics
from tests.metered import counted, metered
from tests.relay_sender import relay
from tests.unit.trainer.scene import save_base

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SHAPES = {
    "experts and groups": {
        "tensor_parallel": 2,
        "expert_parallel": 2,
        "attention_data_parallel": 2,
    },
    "heads": {"tensor_parallel": 2},
    "groups": {"tensor_parallel": 2, "attention_data_parallel": 2},
}
REQUESTS = 6
TOLERANCE_NATS = 1e-4
ENDS_WITHIN_S = 20.0
"""By default SGLang would first wait for 65 s if the other process is still there."""


class Spread(NamedTuple):
    """An engine that is up, the model behind it, and other weights of that model."""

    url: str
    model: Path
    trained: Path
    options: EngineOptions


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if number == 0 else pytest.mark.long)
        for number, name in enumerate(SHAPES)
    ],
)
def spread(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Spread]:
    shape = SHAPES[request.param]
    has_experts = "expert_parallel" in shape
    model = ENGINE_MODEL
    if has_experts:
        model = mixture(tmp_path_factory.mktemp("mixture"))
        shutil.copy(ENGINE_MODEL / "chat_template.jinja", model)
    trained = perturbed(model, tmp_path_factory.mktemp("trained"), seed=1)
    options = engine_options(**shape)
    with started_engine(tmp_path_factory.mktemp("engine"), options, model=model) as url:
        yield Spread(url, model, trained, options)


@asynccontextmanager
async def serving_scene(spread: Spread) -> AsyncIterator[LaneScene]:
    reset_engine(spread.url, spread.model)
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(log, model=spread.model, engine_url=spread.url)
    async with scene.serving():
        await scene.report(is_serving=True)
        yield scene


def every_parameter(folder: Path) -> tuple[SampledParameter, ...]:
    return sampled_parameters(folder / "model.safetensors", key=KEY, count=10_000)


async def sampled_of(scene: LaneScene, *, first: int) -> list[FinishedCompletion]:
    """Completions of episodes that begin at once, so that each group of processes has some."""
    for number in range(first, first + REQUESTS):
        await scene.request(number, [*CONTEXT, number], episode=number, max_tokens=20)
    records = await scene.finished(count=first + REQUESTS, timeout_s=60)
    return [each for each in records if int(each.request_id, 16) >= first]


def check_sampled_by(records: list[FinishedCompletion], model: Path, *, version: int) -> None:
    """Every token was sampled under this version, by the model in this folder."""
    assert len(records) == REQUESTS
    for record in records:
        context = [*CONTEXT, int(record.request_id, 16)]
        output = list(unpack_ids(record.output))
        assert [span[3] for span in spans(record)] == [version], record.error
        expected = logprobs(model, [*context, *output], first=len(context))
        assert list(unpack_floats(record.logprobs)) == pytest.approx(expected, abs=TOLERANCE_NATS)


async def test_new_weights_reach_every_process_by_broadcast_by_relay_and_from_the_durable_copy(
    spread: Spread,
) -> None:
    model, trained = spread.model, spread.trained
    async with (
        serving_scene(spread) as scene,
        sending(trained, spread.url) as trainer,
    ):
        base = await sampled_of(scene, first=0)
        offers = await trainer.offer()
        sampled = every_parameter(trained)
        await scene.publish(trained, version=1, fast_paths=offers, sampled=sampled)
        await trainer.send()
        await scene.loaded(count=2, timeout_s=60)
        by_broadcast = await sampled_of(scene, first=REQUESTS)
        address = (await scene.report(is_serving=True)).weights_address
        await relay(model, [address], version=2)
        to_us, sampled = (RelayedLane(lane=0, epoch=1),), every_parameter(model)
        await scene.publish(model, version=2, relayed_to=to_us, sampled=sampled)
        await scene.loaded(count=3, timeout_s=60)
        by_relay = await sampled_of(scene, first=2 * REQUESTS)
        await scene.publish(trained, version=3)
        loaded = await scene.loaded(count=4, timeout_s=60)
        durable = await sampled_of(scene, first=3 * REQUESTS)
    assert [each.path for each in loaded] == ["start", "fast", "fast", "durable"]
    assert scene.events_named("wrong_tensor") == []
    check_sampled_by(by_broadcast, trained, version=1)
    check_sampled_by(by_relay, model, version=2)
    check_sampled_by(durable, trained, version=3)
    check_sampled_by(base, model, version=0)


async def test_a_load_that_fails_in_one_process_has_failed_and_the_durable_copy_is_loaded(
    spread: Spread,
) -> None:
    """The trainer takes the engine for one of a single process: the others have no place."""
    async with (
        serving_scene(spread) as scene,
        publisher(spread.trained, "send", ranks=1) as trainer,
    ):
        offers = await trainer.offer()
        await scene.publish(spread.trained, version=1, fast_paths=offers)
        _, loaded = await scene.loaded(count=2, timeout_s=60)
        records = await sampled_of(scene, first=0)
    assert (loaded.path, loaded.version) == ("durable", 1)
    (failed,) = scene.events_named("fast_path_failed")
    assert "process 1: " in failed["error"]
    check_sampled_by(records, spread.trained, version=1)


async def test_a_wrong_norm_is_found_in_processes_that_all_have_it(
    spread: Spread, tmp_path: Path
) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    sent = spoiled(spread.trained, tmp_path / "sent", tensor=norm)
    async with (
        serving_scene(spread) as scene,
        sending(sent, spread.url) as trainer,
    ):
        offers = await trainer.offer()
        sampled = every_parameter(spread.trained)
        await scene.publish(spread.trained, version=1, fast_paths=offers, sampled=sampled)
        await trainer.send()
        _, loaded = await scene.loaded(count=2, timeout_s=60)
        records = await sampled_of(scene, first=0)
    assert loaded.path == "durable"
    assert [event["tensor"] for event in scene.events_named("wrong_tensor")] == [norm]
    check_sampled_by(records, spread.trained, version=1)


async def until_sampled(scene: LaneScene, *, tokens: int) -> None:
    """Wait until the engine holds so many tokens of contexts and outputs."""
    async with asyncio.timeout(60):
        while True:
            load = (await scene.report(is_serving=True)).load
            if load is not None and load.used_tokens >= tokens:
                return
            await asyncio.sleep(0.02)


async def test_weights_that_come_while_every_group_samples_split_the_outputs_at_the_version(
    spread: Spread,
) -> None:
    async with (
        serving_scene(spread) as scene,
        sending(spread.trained, spread.url) as trainer,
    ):
        offers = await trainer.offer()
        for number in range(REQUESTS):
            context = [*CONTEXT, number]
            await scene.request(number, context, episode=number, max_tokens=150, temperature=5.0)
        await until_sampled(scene, tokens=REQUESTS * (len(CONTEXT) + 10))
        await scene.publish(spread.trained, version=1, fast_paths=offers)
        await trainer.send()
        await scene.loaded(count=2, timeout_s=60)
        records = await scene.finished(count=REQUESTS, timeout_s=120)
    split = [record for record in records if len(record.spans) == 2]
    # The others drew the end-of-sequence token before.
    assert len(split) >= 2, [spans(record) for record in records]
    for record in split:
        context = [*CONTEXT, int(record.request_id, 16)]
        tokens = [*context, *unpack_ids(record.output)]
        change = len(context) + record.spans[0].end
        for model, first, last in (
            (spread.model, len(context), change),
            (spread.trained, change, len(tokens)),
        ):
            expected = logprobs(model, tokens[:last], first=first, temperature=5.0)
            held = unpack_floats(record.logprobs)[first - len(context) : last - len(context)]
            assert list(held) == pytest.approx(expected, abs=TOLERANCE_NATS)


async def test_each_turn_finds_the_turn_before_it_in_its_group(spread: Spread) -> None:
    """SGLang would give turns to groups by turns, each of which has a cache of its own."""
    async with serving_scene(spread) as scene:
        for number in range(REQUESTS):
            await scene.request(number, turn_of(number), episode=number, max_tokens=4)
            first = await scene.finished(count=number + 1, timeout_s=60)
        # Beginning with the second, so that groups by turns would be the others.
        for count, number in enumerate((*range(1, REQUESTS), 0), REQUESTS + 1):
            await scene.request(
                REQUESTS + number,
                [70, 71],
                episode=number,
                parent=number,
                shared=len(turn_of(number)) + len(first[number].output) // 4,
                is_delta=True,
                max_tokens=4,
            )
            records = await scene.finished(count=count, timeout_s=60)
    later = records[REQUESTS:]
    assert {record.error for record in later} == {""}
    assert min(record.cached_tokens for record in later) >= len(turn_of(0))


def turn_of(number: int) -> list[int]:
    """Tokens of which other episodes have none at the same place."""
    return [100 + 10 * number + each for each in range(10)] * 3


@pytest.mark.long
async def test_the_gateway_knows_what_the_groups_of_an_engine_have_cached(spread: Spread) -> None:
    reset_engine(spread.url, spread.model)
    telemetry, held = metered("gateway")
    async with gateway_on(spread.url, spread.model, telemetry=telemetry) as world:
        await play(world, first=0)
        outcomes = counted(held(), "gateway.cache_outcomes", by="outcome")
        finished = await world.records(topics.FINISHED_COMPLETIONS)
    assert outcomes.total() == GROUPS * SIBLINGS * TURNS
    assert min(record.cached_tokens for record in finished if record.parent_id is not None) > 30
    # A sibling's first turn may be in a group that has not read its prompt.
    is_divided = spread.options.attention_data_parallel > 1
    expected = outcomes.total() - (GROUPS * (SIBLINGS - 1) if is_divided else 0)
    assert outcomes["as_expected"] >= 0.99 * expected, outcomes


async def test_an_abort_takes_nothing_along_that_comes_after_an_answer_of_every_group(
    spread: Spread,
) -> None:
    """Groups take requests from sockets of their own, and what aborts them from the first one's."""
    reset_engine(spread.url, spread.model)
    body = {"input_ids": CONTEXT, "sampling_params": {"max_new_tokens": 2, "temperature": 0.0}}
    async with Engine(spread.url) as engine:
        for number in range(5):
            await engine.abort_all()
            await engine.server_info()
            answers = await asyncio.gather(
                *(
                    engine.generate({**body, "rid": f"{number}.{each}"}, timeout_s=60)
                    for each in range(REQUESTS)
                )
            )
            reasons = {answer.meta_info.finish_reason.type for answer in answers}
            assert "abort" not in reasons, number


@pytest.mark.long
async def test_an_engine_of_which_one_process_is_killed_ends_and_its_requests_fail(
    tmp_path: Path,
) -> None:
    options = engine_options(**SHAPES["heads"])
    server = EngineServer(str(ENGINE_MODEL), tmp_path, port=free_port(), options=options)
    with server as engine:
        (second,) = [
            process
            for process in psutil.process_iter()
            if "_TP1" in process.name() and os.getpgid(process.pid) == engine.pid
        ]
        log = MemoryLog(run="r")
        await create_topics(log)
        scene = LaneScene(log, model=ENGINE_MODEL, engine_url=engine.url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, max_tokens=900, temperature=5.0)
            await scene.until_running()
            os.kill(second.pid, signal.SIGKILL)
            (record,) = await scene.finished(count=1, timeout_s=ENDS_WITHIN_S)
        async with asyncio.timeout(ENDS_WITHIN_S):
            while engine.is_running():  # noqa: ASYNC110 (a process says nothing when it ends)
                await asyncio.sleep(0.1)
    assert (record.finish_reason, record.failure) == ("error", "engine")


@pytest.mark.long
async def test_8_bit_blocks_reach_both_processes_and_are_what_these_compute_with(
    tmp_path: Path,
) -> None:
    """The split is between blocks, so that the numbers are those of one process."""
    model = save_base(
        tmp_path / "model",
        vocab_size=704,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        num_hidden_layers=3,
        max_position_embeddings=1024,
        eos_token_id=2,
    )
    shutil.copy(ENGINE_MODEL / "tokenizer.json", model)
    trained = perturbed(model, tmp_path / "trained", seed=1)
    with started_engine(
        tmp_path / "engine", engine_options(tensor_parallel=2), model=in_blocks(model)
    ) as url:
        async with (
            serving_fp8(url, model) as scene,
            sending(in_blocks(trained), url) as trainer,
        ):
            await scene.publish(in_blocks(model), version=0)
            await scene.loaded(count=2, timeout_s=60)
            await scene.request(1, CONTEXT, max_tokens=24)
            await scene.finished(count=1, timeout_s=60)
            offers = await trainer.offer()
            await scene.publish(in_blocks(trained), version=1, fast_paths=offers)
            await trainer.send()
            *_, loaded = await scene.loaded(count=3, timeout_s=60)
            await scene.request(2, CONTEXT, max_tokens=24)
            first, second = await scene.finished(count=2, timeout_s=60)
    assert (loaded.path, loaded.version) == ("fast", 1)
    for record, weights, version in ((first, model, 0), (second, trained, 1)):
        assert [span[3] for span in spans(record)] == [version]
        check_rounded(record, weights, CONTEXT)
