"""Two real engines with a draft head and one pool: the K/V of policy and head that one has made,
the other finds there."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forgemq_inference.core.engine_answer import EngineAnswer
from forgemq_inference.engine import Engine
from forgemq_sglang_cpu.pool import EnginePool
from tests.engine_fixture import ENGINE_MODEL, engine_options, started_engine
from tests.integration.draft_heads import fitted_head
from tests.integration.test_pool import (
    FOUND_TOKENS,
    NEW,
    OLD,
    PAGE_TOKENS,
    PAGES,
    Pooled,
    body,
    computed,
    context_of,
    update,
    values_of,
)
from tests.integration.test_weights_engine import perturbed

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

CONTEXT = context_of(41)
TOKENS = 40
LEARNED_MIN = 1.3


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooled]:
    """Two engines that guess with a head which knows how the context goes on."""
    folder = tmp_path_factory.mktemp("pool")
    pool = EnginePool(
        storage="file", folder=str(folder), page_tokens=PAGE_TOKENS, prefetch="wait_complete"
    )
    head = tmp_path_factory.mktemp("heads") / "learned"
    fitted_head(ENGINE_MODEL, head, contexts=[CONTEXT], tokens=TOKENS)
    options = msgspec.structs.replace(engine_options(), head=str(head), pool=pool)
    logs = [tmp_path_factory.mktemp("engine") for _ in range(2)]
    with started_engine(logs[0], options) as first, started_engine(logs[1], options) as second:
        yield Pooled(first, second, folder)


async def answered(engine: Engine, *, weights: str) -> EngineAnswer:
    return await engine.generate(body(CONTEXT, tokens=TOKENS, weights=weights), timeout_s=60)


def from_pool(answer: EngineAnswer) -> int:
    details = answer.meta_info.cached_tokens_details
    return details.storage if details else 0


async def test_an_engine_finds_policys_and_heads_kv_of_its_own_weights(
    pooled: Pooled, tmp_path: Path
) -> None:
    """Each guesses as well from what it found as the other did from what it computed."""
    trained = perturbed(ENGINE_MODEL, tmp_path / "trained", seed=2)
    async with Engine(pooled.first) as first, Engine(pooled.second) as second:
        for pages, name, model in ((PAGES, OLD, ENGINE_MODEL), (2 * PAGES, NEW, trained)):
            if name == NEW:
                for engine in (first, second):
                    await engine.pause(timeout_s=30)
                    await update(engine, trained, name=NEW)
            cold = await answered(first, weights=name)
            # A page of the policy and one of the head.
            await pooled.until_written(pages_min=2 * pages - 2)
            found = await answered(second, weights=name)
            assert (from_pool(cold), from_pool(found)) == (0, FOUND_TOKENS)
            assert found.output_ids == cold.output_ids
            for answer in (cold, found):
                assert values_of(answer) == computed(model, CONTEXT, cold.output_ids)
            passes = [answer.meta_info.spec_verify_ct for answer in (cold, found)]
            assert passes[0] == passes[1]
            if name == OLD:
                # What the head knows by heart; of one that guesses nothing it would be TOKENS - 1.
                assert passes[0] < TOKENS / LEARNED_MIN, passes
