"""Two real engines and one pool of K/V: what one has computed, the other need not."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_inference.core.engine_answer import EngineAnswer
from forgemq_inference.engine import Engine
from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.pool import EnginePool
from forgemq_sglang_cpu.server import EngineServer
from tests.engine_fixture import ONE_OR_TWO_PROCESSES, START_TIMEOUT_S, reset_engine
from tests.integration.test_weights_engine import logprobs, perturbed
from tests.lane_scene import LaneScene, create_topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PAGE_TOKENS = 16
CONTEXT_TOKENS = 640
PAGES = CONTEXT_TOKENS // PAGE_TOKENS
# The last token of a context is read again, and with it the page it is in.
FOUND_TOKENS = CONTEXT_TOKENS - PAGE_TOKENS
OLD, NEW = "0.0", "1.1"


def context_of(step: int) -> list[int]:
    return [number * step % 690 + 5 for number in range(CONTEXT_TOKENS)]


class Pooled(NamedTuple):
    """The addresses of two engines, and the folder they share."""

    first: str
    second: str
    folder: Path

    async def until_written(self, *, pages_min: int) -> int:
        """Wait until the folder has so many pages and gets no more; returns how many it has."""
        seen = -1
        async with asyncio.timeout(30):
            while (count := len(list(self.folder.glob("*.bin")))) != seen or count < pages_min:
                seen = count
                await asyncio.sleep(0.7)
        return count


@pytest.fixture(scope="module", params=ONE_OR_TWO_PROCESSES)
def two_engines(
    request: Any, engine_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pooled]:
    folder = tmp_path_factory.mktemp("pool")
    pool = EnginePool(
        storage="file", folder=str(folder), page_tokens=PAGE_TOKENS, prefetch="wait_complete"
    )
    servers = [
        EngineServer(
            str(engine_model),
            tmp_path_factory.mktemp("engine"),
            port=free_port(),
            options=EngineOptions(pool=pool, tensor_parallel=request.param),
        )
        for _ in range(2)
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_healthy(timeout_s=START_TIMEOUT_S)
        yield Pooled(servers[0].url, servers[1].url, folder)
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def pooled(two_engines: Pooled, engine_model: Path) -> Pooled:
    """The engines on the base weights and with an empty pool."""
    for url in (two_engines.first, two_engines.second):
        reset_engine(url, engine_model)
    for page in two_engines.folder.glob("*.bin"):
        page.unlink()
    return two_engines


@pytest.fixture(scope="module")
def trained(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(engine_model, tmp_path_factory.mktemp("trained"), seed=2)


@asynccontextmanager
async def lanes_on(pooled: Pooled, model: Path) -> AsyncIterator[tuple[LaneScene, LaneScene]]:
    """A lane for each engine; they read different logs, so that one can be behind."""
    async with AsyncExitStack() as stack:
        scenes = []
        for url in (pooled.first, pooled.second):
            log = MemoryLog(run="r")
            await create_topics(log)
            scenes.append(LaneScene(log, model=model, engine_url=url))
            await stack.enter_async_context(scenes[-1].serving())
            await scenes[-1].report(is_serving=True)
        yield scenes[0], scenes[1]


async def asked(scene: LaneScene, number: int, context: list[int]) -> FinishedCompletion:
    await scene.request(number, context, max_tokens=4, temperature=0.0)
    records = await scene.finished(count=number)
    assert records[-1].error == ""
    return records[-1]


def computed(model: Path, context: list[int], output: list[int]) -> Any:
    """Log-probabilities of the output as plain transformers compute them, with no cache."""
    return pytest.approx(logprobs(model, context + output, first=len(context)), abs=1e-3)


async def asked_around_an_update(
    pooled: Pooled, context: list[int], *, model: Path, new: Path
) -> tuple[FinishedCompletion, FinishedCompletion, FinishedCompletion, FinishedCompletion]:
    """The first engine's answer and the second's, then both again behind new weights."""
    async with lanes_on(pooled, model) as (first, second):
        cold = await asked(first, 1, context)
        await pooled.until_written(pages_min=PAGES)
        found = await asked(second, 1, context)
        for scene in (first, second):
            await scene.publish(new, version=1)
            await scene.loaded(count=2)
        again = await asked(first, 2, context)
        await pooled.until_written(pages_min=2 * PAGES)
        found_again = await asked(second, 2, context)
    return cold, found, again, found_again


async def test_an_engine_finds_what_another_computed_until_both_have_new_weights(
    pooled: Pooled, engine_model: Path, trained: Path
) -> None:
    context = context_of(7)
    asked_of_both = await asked_around_an_update(pooled, context, model=engine_model, new=trained)
    cold, found, new, new_found = asked_of_both
    tiers = [
        (record.cached_tokens, record.cached_tokens_host, record.cached_tokens_storage)
        for record in (cold, found, new, new_found)
    ]
    fetched = (FOUND_TOKENS, 0, FOUND_TOKENS)
    assert tiers == [(0, 0, 0), fetched, (0, 0, 0), fetched]
    for computing, fetching, model in ((cold, found, engine_model), (new, new_found, trained)):
        assert computing.output == fetching.output
        values = unpack_floats(fetching.logprobs)
        assert values == pytest.approx(unpack_floats(computing.logprobs), abs=1e-5)
        assert values == computed(model, context, unpack_ids(fetching.output))
    assert [record.spans[0].version for record in (found, new_found)] == [0, 1]


def body(context: list[int], *, tokens: int, weights: str) -> dict[str, Any]:
    return {
        "input_ids": context,
        "extra_key": weights,
        "return_logprob": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }


async def until_decoding(engine: Engine) -> None:
    """Return when the engine has sampled some tokens beyond the context."""
    async with asyncio.timeout(30):
        while True:
            if (await engine.counters()).num_used_tokens >= CONTEXT_TOKENS + 2 * PAGE_TOKENS:
                return
            await asyncio.sleep(0.05)


async def update(engine: Engine, model: Path, *, name: str) -> None:
    await engine.load_folder(str(model), name=name, timeout_s=60)
    await engine.resume(timeout_s=30)


async def answered(engine: Engine, context: list[int], *, weights: str, model: Path) -> int:
    """Ask for a few tokens, check them against the model's own; returns tokens from the pool."""
    answer = await engine.generate(body(context, tokens=4, weights=weights), timeout_s=60)
    assert values_of(answer) == computed(model, context, answer.output_ids)
    details = answer.meta_info.cached_tokens_details
    return details.storage if details else 0


def values_of(answer: EngineAnswer) -> list[float]:
    return [entry[0] for entry in answer.meta_info.output_token_logprobs if entry[0] is not None]


async def test_what_an_update_interrupts_is_never_found_under_the_old_weights(
    pooled: Pooled, engine_model: Path, trained: Path
) -> None:
    """One request is retracted, another waits, when the first engine gets weights; both name the
    old ones. The second engine still has those, and is asked for what both computed."""
    retracted, waiting = context_of(11), context_of(13)
    async with Engine(pooled.first) as first, Engine(pooled.second) as second:
        long = asyncio.create_task(
            first.generate(body(retracted, tokens=320, weights=OLD), timeout_s=120)
        )
        await until_decoding(first)
        await first.pause(timeout_s=30)
        short = asyncio.create_task(
            first.generate(body(waiting, tokens=4, weights=OLD), timeout_s=120)
        )
        await asyncio.sleep(0.5)
        await update(first, trained, name=NEW)
        continued, _ = await long, await short
        versions = [span.version for span in continued.meta_info.weight_versions or []]
        assert (versions, continued.meta_info.num_retractions) == ([OLD, NEW], 1)
        await pooled.until_written(pages_min=2 * PAGES)
        whole = retracted + continued.output_ids
        # Only the context was read by the old weights; the second engine computes the rest.
        assert await answered(second, whole, weights=OLD, model=engine_model) == CONTEXT_TOKENS
        assert await answered(second, waiting, weights=OLD, model=engine_model) == 0
        await second.pause(timeout_s=30)
        await update(second, trained, name=NEW)
        found = await answered(second, whole, weights=NEW, model=trained)
        assert found >= len(whole) - 2 * PAGE_TOKENS
        assert await answered(second, waiting, weights=NEW, model=trained) == FOUND_TOKENS
