"""A pool on a real engine as runs have it by default: a wait with a limit, and a bounded folder."""

import asyncio
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from forgemq_inference.engine import Engine
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.pool import EnginePool
from tests.engine_fixture import started_engine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PAGE_TOKENS = 16
CONTEXT_TOKENS = 640
PAGES = CONTEXT_TOKENS // PAGE_TOKENS
FOLDER_BYTES_MAX = 1_500_000
CONTEXTS = 6
"""Each has 40 pages of 24 kB and some bytes, so that one fits beside half of another."""


def context_of(step: int) -> list[int]:
    return [number * step % 690 + 5 for number in range(CONTEXT_TOKENS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pool = EnginePool(
        storage="file",
        folder=str(folder),
        folder_gb_max=FOLDER_BYTES_MAX / 1e9,
        page_tokens=PAGE_TOKENS,
    )
    assert pool.prefetch == "timeout"
    with started_engine(tmp_path_factory.mktemp("engine"), EngineOptions(pool=pool)) as url:
        yield url


async def found_in_storage(engine: Engine, context: list[int]) -> int:
    """Tokens of a context that the engine reads from the pool."""
    sampling = {"temperature": 0, "max_new_tokens": 4}
    answer = await engine.generate(
        {"input_ids": context, "sampling_params": sampling}, timeout_s=60.0
    )
    tiers = answer.meta_info.cached_tokens_details
    return tiers.storage if tiers else 0


def forget(url: str) -> None:
    """Empty the engine's own cache and the tier beside it; the pool stays."""
    request = urllib.request.Request(f"{url}/flush_cache", method="POST", data=b"")
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200


async def until_written(folder: Path) -> int:
    """Wait until the folder changes no more; returns its bytes."""
    seen: dict[str, int] = {}
    async with asyncio.timeout(60):
        while (now := await asyncio.to_thread(sizes, folder)) != seen or not now:
            seen = now
            await asyncio.sleep(1.0)
    return sum(now.values())


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each page; one that is deleted meanwhile is left out."""
    found = {}
    for page in folder.glob("*.bin"):
        with suppress(FileNotFoundError):
            found[page.name] = page.stat().st_size
    return found


async def test_a_request_waits_for_the_pool_within_its_limit_and_finds_what_it_has(
    url: str, folder: Path
) -> None:
    async with Engine(url) as engine:
        assert await found_in_storage(engine, context_of(3)) == 0
        await until_written(folder)
        forget(url)
        assert await found_in_storage(engine, context_of(3)) == CONTEXT_TOKENS - PAGE_TOKENS


async def test_the_folder_stays_within_its_limit_and_keeps_what_came_last(
    url: str, folder: Path
) -> None:
    async with Engine(url) as engine:
        for number in range(CONTEXTS):
            await found_in_storage(engine, context_of(7 + 2 * number))
            assert 0 < await until_written(folder) <= FOLDER_BYTES_MAX
        forget(url)
        newest = await found_in_storage(engine, context_of(7 + 2 * (CONTEXTS - 1)))
        forget(url)
        oldest = await found_in_storage(engine, context_of(7))
    assert (newest, oldest) == (CONTEXT_TOKENS - PAGE_TOKENS, 0)
