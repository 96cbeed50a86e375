"""A lane of two real engines, one that reads contexts and one that samples."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_inference.engine import EngineRefusedError
from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.pair import missing_on_cpu
from forgemq_sglang_cpu.server import EngineServer
from tests.engine_fixture import START_TIMEOUT_S, processes_of, reset_engine
from tests.integration.test_weights_engine import logprobs, perturbed, publisher, spans
from tests.lane_scene import LaneScene, create_topics

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_on_cpu()), reason=f"a pair needs {missing_on_cpu()}"),
]

CONTEXT = [10, 20, 30, 40, 50, 60]
INTERRUPTED = 12
"""Completions that run when new weights come; some of them end before."""
TOKENS = 900
"""Of a completion that new weights interrupt: some 10 s of decoding."""


class PairServers(NamedTuple):
    prefill: EngineServer
    decode: EngineServer


@contextmanager
def started_pair(
    options: EngineOptions,
    *,
    folders: Sequence[Path],
    model: Path,
    processes: tuple[int, int] = (1, 1),
) -> Iterator[PairServers]:
    """A prefill and a decode engine with these options, each with its logs in a folder."""
    reads, samples = (
        msgspec.structs.replace(options, tensor_parallel=number) for number in processes
    )
    roles = (
        msgspec.structs.replace(reads, role="prefill", bootstrap_port=free_port()),
        msgspec.structs.replace(samples, role="decode"),
    )
    pair = PairServers(
        *(
            EngineServer(str(model), folder, port=free_port(), options=role)
            for folder, role in zip(folders, roles, strict=True)
        )
    )
    try:
        for server in pair:
            server.start()
        for server in pair:
            server.wait_healthy(timeout_s=START_TIMEOUT_S)
        yield pair
    finally:
        for server in pair:
            server.stop()


@pytest.fixture(
    scope="module",
    params=[
        (1, 1),
        *(pytest.param(sizes, marks=pytest.mark.long) for sizes in ((2, 2), (2, 1), (1, 2))),
    ],
    ids="{0[0]}-to-{0[1]}".format,
)
def servers(
    request: Any, engine_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PairServers]:
    folders = [tmp_path_factory.mktemp(role) for role in PairServers._fields]
    with started_pair(
        EngineOptions(), folders=folders, model=engine_model, processes=request.param
    ) as pair:
        yield pair


def processes_of_both(pair: PairServers) -> int:
    return sum(processes_of(server.url) for server in pair)


@pytest.fixture
def pair(servers: PairServers, engine_model: Path) -> PairServers:
    """Both engines on the base weights, idle and named 0.0."""
    for server in reversed(servers):
        reset_engine(server.url, engine_model)
    return servers


@pytest.fixture(scope="module")
def trained(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(engine_model, tmp_path_factory.mktemp("trained"), seed=1)


async def scene_on(model: Path, url: str) -> LaneScene:
    log = MemoryLog(run="r")
    await create_topics(log)
    return LaneScene(log, model=model, engine_url=url)


@asynccontextmanager
async def serving_pair(pair: PairServers, model: Path) -> AsyncIterator[LaneScene]:
    scene = await scene_on(model, pair.decode.url)
    async with scene.serving(prefill_url=pair.prefill.url):
        await scene.report(is_serving=True)
        yield scene


def by_number(records: Sequence[FinishedCompletion]) -> dict[int, FinishedCompletion]:
    return {int(record.request_id, 16): record for record in records}


def computed(model: Path, context: list[int], output: list[int], **options: Any) -> Any:
    """Log-probabilities of the output as plain transformers compute them."""
    values = logprobs(model, context + output, first=len(context), **options)
    return pytest.approx(values, abs=1e-3)


async def three_turns(scene: LaneScene) -> list[FinishedCompletion]:
    """Greedy turns of one episode, each on top of the one before, and a sampled one beside them."""
    context = [number * 7 % 690 + 5 for number in range(200)]
    for number in range(1, 4):
        await scene.request(number, context, max_tokens=24, temperature=0.0)
        records = by_number(await scene.finished(count=number))
        context = [*context, *unpack_ids(records[number].output), 11, 12, 13]
    await scene.request(4, CONTEXT, max_tokens=24, temperature=1.0)
    records = by_number(await scene.finished(count=4))
    return [records[number] for number in range(1, 5)]


async def test_a_pair_answers_as_one_engine_does(
    pair: PairServers, base_engine_url: str, engine_model: Path
) -> None:
    unified = await scene_on(engine_model, base_engine_url)
    async with unified.serving():
        await unified.report(is_serving=True)
        expected = await three_turns(unified)
    async with serving_pair(pair, engine_model) as scene:
        records = await three_turns(scene)
        report = await scene.report(is_serving=True)
    assert report.ranks == processes_of_both(pair)
    for record, other in zip(records[:3], expected[:3], strict=True):
        assert (record.error, record.finish_reason) == ("", other.finish_reason)
        assert record.output == other.output
        values, others = unpack_floats(record.logprobs), unpack_floats(other.logprobs)
        assert values[0] == pytest.approx(others[0], abs=1e-5)
        assert values == pytest.approx(others, abs=1e-4)
        # The second and third turn find in a cache what the first one finds in none.
        assert (record.cached_tokens > 200) == (other.cached_tokens > 200)
    sampled = records[3]
    assert unpack_floats(sampled.logprobs) == computed(
        engine_model, CONTEXT, unpack_ids(sampled.output)
    )
    assert sampled.support == "full"


@pytest.mark.parametrize("path", ["fast", "durable"])
async def test_new_weights_in_the_middle_of_decoding_reach_both_engines(
    pair: PairServers, engine_model: Path, trained: Path, path: str
) -> None:
    """Prefill reads the retracted requests again under the new weights, so that tokens after the
    split have the new model's log-probabilities."""
    async with (
        serving_pair(pair, engine_model) as scene,
        publisher(trained, "send", ranks=processes_of_both(pair)) as trainer,
    ):
        offers = await trainer.offer()
        for number in range(1, INTERRUPTED + 1):
            await scene.request(number, [*CONTEXT, number], max_tokens=TOKENS, temperature=5.0)
        await scene.until_running()
        await scene.publish(trained, version=1, fast_paths=offers if path == "fast" else ())
        # Comes while the pair loads and is read under the new weights, or just before.
        late = INTERRUPTED + 1
        await scene.request(late, [*CONTEXT, late], max_tokens=20, temperature=5.0)
        if path == "fast":
            await trainer.send()
            assert await trainer.result() == {"0": ""}
        _, loaded = await scene.loaded(count=2, timeout_s=60)
        await scene.request(INTERRUPTED + 2, CONTEXT, max_tokens=20)
        records = by_number(await scene.finished(count=INTERRUPTED + 2, timeout_s=120))
    assert (loaded.path, loaded.version) == (path, 1)
    assert [record.error for record in records.values()] == [""] * (INTERRUPTED + 2)
    split = [record for record in records.values() if len(record.spans) == 2]
    assert split, [spans(record) for record in records.values()]
    for record in split:
        context = [*CONTEXT, int(record.request_id, 16)]
        tokens, end = unpack_ids(record.output), record.spans[0].end
        old = logprobs(engine_model, context + tokens, first=len(context), temperature=5.0)
        new = logprobs(trained, context + tokens, first=len(context), temperature=5.0)
        values = unpack_floats(record.logprobs)
        assert values == pytest.approx(old[:end] + new[end:], abs=1e-3)
        assert record.retractions == 1
    last = records[INTERRUPTED + 2]
    assert spans(last) == [(0, len(last.output) // 4, 1, 1)]
    tokens = unpack_ids(last.output)
    assert unpack_floats(last.logprobs) == computed(trained, CONTEXT, tokens)


async def test_a_prefill_engine_that_is_killed_while_it_sends_fails_attempts_and_nothing_else(
    pair: PairServers, engine_model: Path, trained: Path
) -> None:
    """Its successor has other weights than decode: the lane serves once both have the newest."""
    long = [[(number * 13 + step) % 690 + 5 for step in range(900)] for number in range(24)]
    async with serving_pair(pair, engine_model) as scene:
        await scene.publish(trained, version=1)
        await scene.loaded(count=2)
        for number, context in enumerate(long, start=1):
            await scene.request(number, context, max_tokens=8, temperature=0.0)
        # The first contexts are read and sent, others wait for their turn.
        await scene.finished(count=1, timeout_s=60)
        pair.prefill.stop()
        broken = await scene.finished(count=24, timeout_s=60)
        await scene.report(is_serving=False)
        await asyncio.to_thread(pair.prefill.start)
        await asyncio.to_thread(pair.prefill.wait_healthy, timeout_s=START_TIMEOUT_S)
        await scene.report(is_serving=True, timeout_s=60)
        for number in range(25, 28):
            await scene.request(number, long[number - 1 - 24], max_tokens=8, temperature=0.0)
        after = [
            record
            for record in await scene.finished(count=27, timeout_s=60)
            if int(record.request_id, 16) > len(long)
        ]
    failed = [record for record in broken if record.error]
    assert 0 < len(failed) < len(long)
    assert {(record.failure, record.output) for record in failed} == {("engine", b"")}
    assert [record.error for record in after] == [""] * 3
    for record in (*(record for record in broken if not record.error), *after):
        context = long[(int(record.request_id, 16) - 1) % len(long)]
        tokens = unpack_ids(record.output)
        assert unpack_floats(record.logprobs) == computed(trained, context, tokens)
        assert record.spans[0].version == 1
    assert scene.events_named("engine_lost")


async def test_a_decode_engine_that_is_killed_while_it_samples_fails_attempts_and_nothing_else(
    pair: PairServers, engine_model: Path, trained: Path
) -> None:
    """Prefill stays up and keeps its weights; the lane serves once decode has the newest too."""
    async with serving_pair(pair, engine_model) as scene:
        await scene.publish(trained, version=1)
        await scene.loaded(count=2)
        await scene.request(1, CONTEXT, max_tokens=8)
        await scene.finished(count=1, timeout_s=60)
        for number in range(2, INTERRUPTED + 1):
            await scene.request(number, [*CONTEXT, number], max_tokens=TOKENS, temperature=5.0)
        await scene.until_running()
        pair.decode.stop()
        broken = by_number(await scene.finished(count=INTERRUPTED, timeout_s=60))
        await scene.report(is_serving=False)
        await asyncio.to_thread(pair.decode.start)
        await asyncio.to_thread(pair.decode.wait_healthy, timeout_s=START_TIMEOUT_S)
        await scene.report(is_serving=True, timeout_s=60)
        later = range(INTERRUPTED + 1, INTERRUPTED + 4)
        for number in later:
            await scene.request(number, [*CONTEXT, number], max_tokens=8, temperature=0.0)
        records = by_number(await scene.finished(count=INTERRUPTED + 3, timeout_s=60))
    assert broken.pop(1).error == ""
    failed = [record for record in broken.values() if record.error]
    assert failed
    assert {(record.failure, record.output) for record in failed} == {("engine", b"")}
    for number in later:
        tokens = unpack_ids(records[number].output)
        assert (records[number].error, records[number].spans[0].version) == ("", 1)
        assert unpack_floats(records[number].logprobs) == computed(
            trained, [*CONTEXT, number], tokens
        )
    assert scene.events_named("engine_lost")


async def test_half_a_pair_is_refused_by_name(pair: PairServers, engine_model: Path) -> None:
    """Each engine generates by itself only for a peer, so a lane with one of them never would."""
    scene = await scene_on(engine_model, pair.decode.url)
    with pytest.raises(ExceptionGroup) as alone:
        async with scene.serving():
            await asyncio.sleep(30)
    assert alone.group_contains(
        EngineRefusedError, match="is a decode engine: the lane needs FORGEMQ_INFERENCE_PREFILL_URL"
    )
    scene = await scene_on(engine_model, pair.prefill.url)
    with pytest.raises(ExceptionGroup) as swapped:
        async with scene.serving(prefill_url=pair.decode.url):
            await asyncio.sleep(30)
    assert swapped.group_contains(EngineRefusedError, match="--disaggregation-mode decode, it must")
