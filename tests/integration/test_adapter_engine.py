"""Adapters into a real SGLang server: what it samples is the base model with the newest of them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.lora import Lora
from forgemq_sglang_cpu.adapters import EngineAdapters
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_trainer.core.low_rank import add_adapters, factors_of, merge_factors
from forgemq_trainer.loading import fill_adapters
from forgemq_trainer.storage.adapters import write_adapter
from tests.engine_fixture import ONE_OR_TWO_PROCESSES, started_engine
from tests.lane_scene import LaneScene, create_topics

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

CONTEXT = [10, 20, 30, 40, 50, 60]
LORA = Lora(rank=8, alpha=16.0)


@pytest.fixture(scope="module", params=ONE_OR_TWO_PROCESSES)
def adapter_engine_url(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine that serves adapters."""
    adapters = EngineAdapters(rank=LORA.rank, targets=LORA.targets)
    options = EngineOptions(adapters=adapters, tensor_parallel=request.param)
    with started_engine(tmp_path_factory.mktemp("engine"), options) as url:
        yield url


@pytest.fixture(scope="module")
def adapters(
    engine_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Path, torch.nn.Module]]:
    """Three adapters as the trainer writes them, and stock models with each of them merged."""
    made = []
    for seed in range(3):
        folder = tmp_path_factory.mktemp(f"adapter-{seed}")
        model = AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.float32)
        add_adapters(model, LORA)
        fill_adapters(model, None, seed=seed)
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("b_OR"):
                    parameter.normal_(std=0.05)
        write_adapter(
            factors_of(model), lora=LORA, base=engine_model, base_sha256="0", folder=folder
        )
        merged = AutoModelForCausalLM.from_pretrained(engine_model, dtype=torch.float32)
        state = model.state_dict()
        merge_factors(state, scale=LORA.scale)
        merged.load_state_dict(state)
        made.append((folder, merged))
    return made


@asynccontextmanager
async def adapter_scene(url: str, model: Path, *, first: Path) -> AsyncIterator[LaneScene]:
    """A lane that joins late: version 1 is published before it starts."""
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(log, model=model, engine_url=url)
    await scene.publish(first, version=1)
    async with scene.serving():
        await scene.report(is_serving=True)
        yield scene


def logprobs(model: torch.nn.Module, tokens: list[int], *, first: int, at: float) -> list[float]:
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0, first - 1 : -1] / at, -1)
    return rows.gather(1, torch.tensor(tokens[first:])[:, None])[:, 0].tolist()


async def test_every_token_is_sampled_by_the_base_model_and_the_adapter_that_its_span_names(
    adapter_engine_url: str, engine_model: Path, adapters: list[tuple[Path, torch.nn.Module]]
) -> None:
    """Two adapters come mid-generation; requests of before go on under each, with its own K/V."""
    folders = [folder for folder, _ in adapters]
    async with adapter_scene(adapter_engine_url, engine_model, first=folders[0]) as scene:
        for number in range(1, 5):
            await scene.request(number, [*CONTEXT, number], max_tokens=900, temperature=5.0)
        for version in (2, 3):
            await scene.until_running()
            await scene.publish(folders[version - 1], version=version)
            *_, loaded = await scene.loaded(count=version, timeout_s=60)
            assert (loaded.path, loaded.version) == ("durable", version)
            assert 0 < loaded.paused_s < 10
        await scene.finished(count=4, timeout_s=300)
        # Its context is one that earlier versions computed too.
        await scene.request(5, [*CONTEXT, 4], max_tokens=20)
        records = await scene.finished(count=5, timeout_s=60)
        async with aiohttp.ClientSession(adapter_engine_url) as session:
            models = await (await session.get("/v1/models")).json()
    held = [each["id"] for each in models["data"] if each["id"] in ("1.1", "1.2", "1.3")]
    assert held == ["1.3"]
    spans = [[span.version for span in record.spans] for record in records]
    assert [1, 2, 3] in spans or ([1, 2] in spans and [2, 3] in spans), spans
    assert [3] in spans
    for record in records:
        number = int(record.request_id, 16)
        context, at = ([*CONTEXT, 4], 1.0) if number == 5 else ([*CONTEXT, number], 5.0)
        tokens = [*context, *unpack_ids(record.output)]
        expected: list[float] = []
        for span in record.spans:
            model = adapters[span.version - 1][1]
            all_of_it = logprobs(model, tokens, first=len(context), at=at)
            expected += all_of_it[span.start : span.end]
        assert list(unpack_floats(record.logprobs)) == pytest.approx(expected, abs=1e-4)
