"""Two engines on one GPU and one pool of K/V, in SGLang's own layout of pages."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.pool import EnginePool
from tests.engine_fixture import ENGINE_MODEL, started_engine
from tests.gpu import in_full
from tests.integration.test_pool import (
    FOUND_TOKENS,
    PAGE_TOKENS,
    Pooled,
    asked_around_an_update,
    context_of,
)
from tests.integration.test_weights_engine import logprobs, perturbed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

IN_FULL = (*in_full.FLAGS, "--mem-fraction-static", "0.2")
GAP_MAX = 2e-3
"""Nats; sums in another order than on a CPU."""


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooled]:
    folder = tmp_path_factory.mktemp("pool")
    options = EngineOptions(
        has_gpu=True,
        gpu_first=torch.cuda.device_count() - 1,
        pool=EnginePool(
            storage="file",
            folder=str(folder),
            page_tokens=PAGE_TOKENS,
            host_gb=1,
            prefetch="wait_complete",
        ),
        extra=IN_FULL,
    )
    with ExitStack() as stack:
        # One after the other: each takes its share of the memory that is free by then.
        first, second = (
            stack.enter_context(
                started_engine(
                    tmp_path_factory.mktemp("engine"), options, environment=in_full.environment()
                )
            )
            for _ in range(2)
        )
        yield Pooled(first, second, folder)


async def test_an_engine_finds_what_another_computed_until_both_have_new_weights(
    pooled: Pooled, tmp_path: Path
) -> None:
    trained = perturbed(ENGINE_MODEL, tmp_path / "trained", seed=2)
    context = context_of(7)
    cold, found, new, new_found = records = await asked_around_an_update(
        pooled, context, model=ENGINE_MODEL, new=trained
    )
    assert [each.cached_tokens_storage for each in records] == [0, FOUND_TOKENS, 0, FOUND_TOKENS]
    for computing, fetching, model in ((cold, found, ENGINE_MODEL), (new, new_found, trained)):
        output = list(unpack_ids(fetching.output))
        assert computing.output == fetching.output
        wanted = logprobs(model, context + output, first=len(context))
        assert list(unpack_floats(fetching.logprobs)) == pytest.approx(wanted, abs=GAP_MAX)
