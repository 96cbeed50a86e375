"""A real SGLang server with a small model that drafts: the policy's tokens, and its own weights."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.speculation import Speculation
from tests.engine_fixture import (
    ENGINE_MODEL,
    ONE_OR_TWO_PROCESSES,
    engine_options,
    reset_engine,
    started_engine,
)
from tests.integration.draft_heads import acceptance
from tests.integration.test_cached_tokens import GROUPS, SIBLINGS, TURNS, play
from tests.integration.test_reply_forms_engine import gateway_on
from tests.integration.test_speculation_engine import (
    GAP_NATS_MAX,
    gap,
    greedy,
    outputs,
    spans,
)
from tests.integration.test_weights_engine import perturbed, sending
from tests.lane_scene import LaneScene, create_topics
from tests.metered import counted, metered

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

DRAFT = Speculation(model=str(ENGINE_MODEL), steps=3)
"""The policy's own base weights: until the policy learns, every guess of greedy tokens holds."""
ALL_HELD_MIN = 3.5
"""Tokens a pass, of 4 at most: an output ends in the middle of its last pass."""


@pytest.fixture(scope="module", params=ONE_OR_TWO_PROCESSES)
def speculating(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = engine_options(draft_model=DRAFT.model, tensor_parallel=request.param)
    with started_engine(tmp_path_factory.mktemp("engine"), options) as url:
        yield url


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(ENGINE_MODEL, tmp_path_factory.mktemp("trained"), seed=1)


@asynccontextmanager
async def serving_scene(url: str) -> AsyncIterator[LaneScene]:
    # From disk SGLang loads policy and draft, which are the same files here.
    reset_engine(url, ENGINE_MODEL)
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(log, model=ENGINE_MODEL, engine_url=url, speculation=DRAFT)
    async with scene.serving():
        await scene.report(is_serving=True)
        yield scene


async def test_a_model_that_guesses_for_itself_is_right_every_time(speculating: str) -> None:
    async with serving_scene(speculating) as scene:
        records = await greedy(scene, first=1)
    assert gap(records, ENGINE_MODEL) < GAP_NATS_MAX
    assert acceptance(records) > ALL_HELD_MIN


@pytest.mark.parametrize("way", ["fast", "durable"])
async def test_new_weights_reach_the_policy_and_leave_the_small_model(
    speculating: str, trained: Path, way: str
) -> None:
    """Back on the weights that the draft has, all of its guesses hold again."""
    async with serving_scene(speculating) as scene:
        before = await greedy(scene, first=10)
        if way == "fast":
            async with sending(trained, speculating) as trainer:
                offers = await trainer.offer()
                await scene.publish(trained, version=1, fast_paths=offers)
                await trainer.send()
                assert await trainer.result() == {"0": ""}
                *_, loaded = await scene.loaded(count=2)
        else:
            await scene.publish(trained, version=1)
            *_, loaded = await scene.loaded(count=2)
        assert (loaded.path, loaded.version) == (way, 1)
        after = await greedy(scene, first=20)
        await scene.publish(ENGINE_MODEL, version=2)
        await scene.loaded(count=3)
        back = await greedy(scene, first=30)
    assert gap(after, trained) < GAP_NATS_MAX
    assert spans(after[0]) == [(0, len(after[0].output) // 4, 1, 1)]
    assert outputs(after) != outputs(before)
    assert 1.0 <= acceptance(after) < acceptance(before)
    assert outputs(back) == outputs(before)
    assert acceptance(back) == acceptance(before) > ALL_HELD_MIN


async def test_the_gateway_expects_what_an_engine_with_a_small_model_has_cached(
    speculating: str,
) -> None:
    reset_engine(speculating, ENGINE_MODEL)
    telemetry, held = metered("gateway")
    async with gateway_on(
        speculating, ENGINE_MODEL, telemetry=telemetry, speculation=DRAFT
    ) as world:
        await play(world, first=0)
        outcomes = counted(held(), "gateway.cache_outcomes", by="outcome")
    assert outcomes.total() == GROUPS * SIBLINGS * TURNS
    assert outcomes["as_expected"] >= 0.99 * outcomes.total(), outcomes
