"""Expert routes from a real engine, through inference and merger, to the trainer."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.loss import Loss
from forgemq_contracts.trees import MergedTree
from forgemq_inference.engine import Engine
from forgemq_merger.core.merger import MergerCore
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.model import load_model
from tests.engine_fixture import (
    ENGINE_MODEL,
    engine_options,
    reset_engine,
    started_engine,
)
from tests.lane_scene import GROUP, LaneScene, create_topics
from tests.unit.merger.records import feed, scored
from tests.unit.trainer.scene import save_base

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

LAYERS, TOP_K, EXPERTS = 3, 2, 8
CONTEXT = [10, 20, 30, 40, 50, 60]
SAMPLED = 150
GAP_NATS_MAX = 1e-4
ATTEMPTS_MAX = 6
"""One completion in four ends by itself at some point, and fewer of them before new weights."""
RUNNING_WITHIN_S = 5.0
"""A heartbeat every 0.1 s says so, unless the completion was over between two of them."""


def mixture(folder: Path, *, noise: float = 0.0) -> Path:
    """A tiny mixture of experts with random weights, which the engine can serve."""
    save_base(
        folder,
        kind="qwen3_moe",
        vocab_size=704,
        hidden_size=64,
        head_dim=16,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=1024,
        eos_token_id=2,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ENGINE_MODEL / name, folder / name)
    if noise:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * torch.randn_like(parameter)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(
    scope="module",
    params=[(1, 1), *(pytest.param(each, marks=pytest.mark.long) for each in ((2, 1), (2, 2)))],
    ids="{0[0]}-processes-{0[1]}-groups".format,
)
def url(request: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine for this file: the session's engine serves a dense model."""
    processes, groups = request.param
    options = engine_options(
        tensor_parallel=processes, expert_parallel=processes, attention_data_parallel=groups
    )
    with started_engine(tmp_path_factory.mktemp("engine"), options, model=model) as url:
        yield url


async def scene_on(url: str, model: Path) -> LaneScene:
    reset_engine(url, model)
    log = MemoryLog(run="r")
    await create_topics(log)
    return LaneScene(log, model=model, engine_url=url)


def chosen_by(model: Path, context: list[int], output: list[int]) -> np.ndarray:
    """Experts that transformers' own model chooses at the token before each output token."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.tensor([[*context, *output]])
    with torch.no_grad():
        logits = policy(tokens, output_router_logits=True).router_logits
    best = torch.stack([layer.topk(TOP_K).indices for layer in logits], dim=1)
    return best[len(context) - 1 : -1].numpy()


def differing(left: np.ndarray, right: np.ndarray) -> list[int]:
    """Indices of the tokens whose experts differ in some layer; their order does not count."""
    return np.flatnonzero((np.sort(left) != np.sort(right)).any(axis=(1, 2))).tolist()


def gap_nats(tree: MergedTree, model: Path, *, dtype: str = "float32") -> np.ndarray:
    """Log-probabilities of the trainer minus those of the engine, by entry."""
    forest = read_tree(tree)
    values = forward_backward(
        load_model(model, dtype=dtype).policy,
        Objective(forests=[forest], loss_weights=[1.0], loss=loss_function(Loss())),
        [Microbatch(groups=(0,), blocks=((0, forest.token_count),))],
        head_chunk=64,
    )
    return np.abs(values.logprob_E - forest.entry_logprob_E)


async def group_of_four(scene: LaneScene) -> MergedTree:
    """Two rollouts of two turns, merged."""
    async with scene.serving():
        await scene.report(is_serving=True)
        for number in (0, 1):
            await scene.request(number, CONTEXT, max_tokens=SAMPLED)
        records = await scene.finished(count=2, timeout_s=60)
        for record in records:
            parent = int(record.request_id, 16)
            shared = len(CONTEXT) + len(unpack_ids(record.output))
            await scene.request(
                parent + 2,
                [70, 71],
                parent=parent,
                shared=shared,
                is_delta=True,
                max_tokens=SAMPLED,
            )
        records = await scene.finished(count=4, timeout_s=60)
    outputs = feed(MergerCore(0), *records, scored(0, 1, 2, 3, group_id=GROUP))
    tree = outputs[0].record
    assert isinstance(tree, MergedTree), outputs
    return tree


async def test_replayed_routes_give_the_trainer_the_engines_log_probabilities(
    url: str, model: Path
) -> None:
    """In float32 both choose the same experts, so an off-by-one in the routes would show."""
    tree = await group_of_four(await scene_on(url, model))
    routes = np.frombuffer(tree.entry_route, "<i2").reshape(-1, LAYERS * TOP_K)
    assert len(routes) == len(tree.entry_token) // 4
    shifted = np.roll(routes, 1, axis=0).tobytes()
    assert gap_nats(tree, model).max() < GAP_NATS_MAX
    assert gap_nats(msgspec.structs.replace(tree, entry_route=shifted), model).max() > 0.1


async def test_replay_takes_the_routing_out_of_the_gap_of_a_trainer_that_chooses_otherwise(
    url: str, model: Path
) -> None:
    """In bfloat16 the trainer's own router flips near ties; recorded routes leave only rounding."""
    tree = await group_of_four(await scene_on(url, model))
    unrouted = msgspec.structs.replace(tree, entry_route=b"")
    replayed, own = (gap_nats(each, model, dtype="bfloat16") for each in (tree, unrouted))
    assert replayed.max() < own.max()


async def completion_of_two_versions(
    scene: LaneScene, models: tuple[Path, Path]
) -> tuple[FinishedCompletion, Path]:
    """A completion during which the lane loaded the other model, and that model.

    A completion may also draw its end-of-sequence token before; then the next one is tried.
    """
    for number in range(ATTEMPTS_MAX):
        newest = models[(number + 1) % 2]
        await scene.request(number, CONTEXT, max_tokens=900)
        with suppress(TimeoutError):
            async with asyncio.timeout(RUNNING_WITHIN_S):
                await scene.until_running()
        await scene.publish(newest, version=number + 1)
        record = (await scene.finished(count=number + 1, timeout_s=60))[-1]
        await scene.loaded(count=number + 2, timeout_s=60)
        if len(record.spans) == 2:
            return record, newest
    pytest.fail(f"none of {ATTEMPTS_MAX} completions saw two versions")


async def prefilled_routes(url: str, model: Path, tokens: list[int]) -> np.ndarray:
    """The routes that the engine reports for one fresh pass over all these tokens."""
    reset_engine(url, model)  # Empties the cache, which would report routes of earlier passes.
    body = {
        "rid": "prefill",
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": len(CONTEXT) - 1,
    }
    async with Engine(url) as engine:
        answer = await engine.generate(body, timeout_s=60)
    recorded = answer.meta_info.routed_experts
    assert recorded is not None
    return np.frombuffer(recorded, "<i4").reshape(-1, LAYERS, TOP_K)


async def test_after_new_weights_the_engine_reports_routes_of_the_pass_under_them(
    url: str, model: Path, tmp_path: Path
) -> None:
    """To the bit: those of one pass over context and output up to the change."""
    models = (model, mixture(tmp_path / "trained", noise=0.05))
    scene = await scene_on(url, model)
    async with scene.serving():
        await scene.report(is_serving=True)
        record, newest = await completion_of_two_versions(scene, models)
    output, before = unpack_ids(record.output), record.spans[0].end
    routes = np.frombuffer(record.routes, "<i2").reshape(-1, LAYERS, TOP_K)
    again = await prefilled_routes(url, newest, [*CONTEXT, *output[:before]])
    assert routes[: before + 1].tolist() == again.tolist()
    # So they are not those of the passes that sampled the tokens, which ran other weights.
    (oldest,) = set(models) - {newest}
    of_older = chosen_by(oldest, CONTEXT, output[:before])
    assert len(differing(routes[:before], of_older)) > before // 2


async def test_routes_are_not_recorded_where_the_output_never_trains(url: str, model: Path) -> None:
    scene = await scene_on(url, model)
    async with scene.serving():
        await scene.report(is_serving=True)
        await scene.request(0, CONTEXT, max_tokens=8, temperature=0.0)
        (record,) = await scene.finished(count=1, timeout_s=60)
    assert record.output
    assert record.routes == b""
