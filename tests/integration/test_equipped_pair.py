"""A prefill and a decode engine that guess tokens, and a pool from which prefill reads contexts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.speculation import Speculation
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.pair import missing_on_cpu
from forgemq_sglang_cpu.pool import EnginePool
from tests.engine_fixture import ENGINE_MODEL, engine_post
from tests.integration.draft_heads import acceptance, fitted_head
from tests.integration.fleet_run import FleetRun
from tests.integration.test_engine_pair import (
    CONTEXT,
    INTERRUPTED,
    TOKENS,
    PairServers,
    by_number,
    computed,
    started_pair,
)
from tests.integration.test_weights_engine import logprobs, perturbed, publisher
from tests.lane_scene import LaneScene, create_topics

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_on_cpu()), reason=f"a pair needs {missing_on_cpu()}"),
]

KNOWN = [41 * number % 690 + 5 for number in range(640)]
KNOWN_TOKENS = 40
PAGE_TOKENS = 16
FOUND_TOKENS = len(KNOWN) - PAGE_TOKENS
TEMPERATURE = 5.0
LEARNED_MIN = 1.3
"""Tokens a pass of a head that knows what follows; one that guesses nothing has 1."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "learned"
    return fitted_head(ENGINE_MODEL, folder, contexts=[KNOWN], tokens=KNOWN_TOKENS)


@pytest.fixture(scope="module")
def pair(head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairServers]:
    folder = str(tmp_path_factory.mktemp("pool"))
    pool = EnginePool(
        storage="file", folder=folder, page_tokens=PAGE_TOKENS, prefetch="wait_complete"
    )
    folders = [tmp_path_factory.mktemp(role) for role in PairServers._fields]
    options = EngineOptions(head=str(head), pool=pool)
    with started_pair(options, folders=folders, model=ENGINE_MODEL) as started:
        yield started


async def greedy(scene: LaneScene, number: int, *, count: int) -> FinishedCompletion:
    """The context that the head knows, asked as request `number`, the one of so many."""
    await scene.request(number, KNOWN, max_tokens=KNOWN_TOKENS, temperature=0.0)
    record = by_number(await scene.finished(count=count, timeout_s=60))[number]
    assert record.error == ""
    return record


async def test_a_pair_guesses_reads_from_a_pool_and_gets_new_weights_while_it_decodes(
    pair: PairServers, head: Path, tmp_path: Path
) -> None:
    trained = perturbed(ENGINE_MODEL, tmp_path / "trained", seed=1)
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(
        log, model=ENGINE_MODEL, engine_url=pair.decode.url, speculation=Speculation(head=str(head))
    )
    async with (
        scene.serving(prefill_url=pair.prefill.url),
        publisher(trained, "send", ranks=2) as trainer,
    ):
        await scene.report(is_serving=True)
        cold = await greedy(scene, 1, count=1)
        await asyncio.sleep(2)
        for server in pair:
            engine_post(server.url)("/flush_cache", {}, (200,))
        found = await greedy(scene, 2, count=2)
        offers = await trainer.offer()
        numbers = range(3, 3 + INTERRUPTED)
        for number in numbers:
            context = [*CONTEXT, number]
            await scene.request(number, context, max_tokens=TOKENS, temperature=TEMPERATURE)
        await scene.until_running()
        await scene.publish(trained, version=1, fast_paths=offers)
        await trainer.send()
        assert await trainer.result() == {"0": ""}
        _, loaded = await scene.loaded(count=2, timeout_s=60)
        records = by_number(await scene.finished(count=2 + INTERRUPTED, timeout_s=120))
        new = await greedy(scene, numbers[-1] + 1, count=3 + INTERRUPTED)
    assert (loaded.path, loaded.version) == ("fast", 1)
    assert (cold.cached_tokens_storage, found.cached_tokens_storage) == (0, FOUND_TOKENS)
    assert found.output == cold.output
    for record, model in ((cold, ENGINE_MODEL), (found, ENGINE_MODEL), (new, trained)):
        assert unpack_floats(record.logprobs) == computed(model, KNOWN, unpack_ids(record.output))
    assert new.cached_tokens_storage == 0
    assert acceptance([cold]) > LEARNED_MIN
    # From the pool prefill has the head's K/V too.
    assert found.verifications == cold.verifications
    check_split([records[number] for number in numbers], trained)
    for event in ("load_failed", "pool_not_attached", "engine_does_not_speculate"):
        assert scene.events_named(event) == []


def check_split(records: list[FinishedCompletion], trained: Path) -> None:
    """Tokens after new weights have the new model's log-probabilities, those before the old's."""
    assert [record.error for record in records] == [""] * INTERRUPTED
    split = [record for record in records if len(record.spans) == 2]
    assert split
    for record in split:
        context = [*CONTEXT, int(record.request_id, 16)]
        tokens, end = unpack_ids(record.output), record.spans[0].end
        old, new = (
            logprobs(model, context + tokens, first=len(context), temperature=TEMPERATURE)
            for model in (ENGINE_MODEL, trained)
        )
        assert unpack_floats(record.logprobs) == pytest.approx(old[:end] + new[end:], abs=1e-3)
        assert record.retractions == 1


@pytest.mark.parametrize("is_equipped", [False, True], ids=["alone", "8 bits, head, pool"])
def test_every_guarantee_holds_in_a_run_whose_lane_is_a_pair(
    kafka_bootstrap, new_run_id, tmp_path, head, is_equipped
):
    steps = 4
    fleet = FleetRun.on(kafka_bootstrap, new_run_id(), tmp_path / "run", steps=steps, environ={})
    beside = (
        "model.engine_quantization=fp8_blocks",
        f"speculation.head={head}",
        "pool.storage=file",
        f"pool.folder={tmp_path / 'kv'}",
    )
    fleet.play("lanes=[{prefill={},decode={}}]", *(beside if is_equipped else ()))
    served = [(each.version, each.path) for each in fleet.loaded(0)]
    assert served[:steps] == [(0, "start"), *((n, "fast") for n in range(1, steps))]
    for event in ("load_failed", "head_not_loaded", "pool_not_attached"):
        assert fleet.events("inference-0", event) == []
    points = fleet.run.report(fleet.run_id)["acceptance"]
    assert bool(points) == is_equipped
    names = [page.name for page in (tmp_path / "kv").glob("*")]
    assert any(".draft_" in name for name in names) == is_equipped
