"""A real engine that holds projections as 8-bit floats in blocks, and its new weights."""

import asyncio
import io
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from wide_demo import wide_demo

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.weights import PublishedWeights, RelayedLane
from forgemq_fp8_blocks import dequantised, quantise_model
from forgemq_inference.engine import EngineRefusedError
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.samples import sampled_parameters
from forgemq_trainer.storage.durable import DurableWeights
from forgemq_trainer.storage.weights import read_weights_folder
from tests.engine_fixture import engine_options, reset_engine, started_engine
from tests.float8 import nearest
from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.test_weights_engine import logprobs, perturbed, publisher, spans
from tests.lane_scene import LaneScene, create_topics
from tests.relay_sender import relay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CONTEXT = [10, 20, 30, 40, 50, 60, 70, 80]
GROUP = 128
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with a key head for each query head, so that all of it has whole blocks."""
    return wide_demo(tmp_path_factory.mktemp("wide") / "model")


def in_blocks(model: Path) -> Path:
    """The model as the trainer publishes it."""
    folder = model.with_name(f"{model.name}-fp8")
    if not folder.exists():
        quantise_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def trained(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(wide, tmp_path_factory.mktemp("trained"), seed=4)


@pytest.fixture(scope="module")
def fp8_server(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("engine")
    with started_engine(folder, engine_options(), model=in_blocks(wide)) as url:
        yield url


@pytest.fixture
def fp8_url(fp8_server: str, wide: Path) -> str:
    """The engine on the base weights."""
    reset_engine(fp8_server, in_blocks(wide))
    return fp8_server


@asynccontextmanager
async def serving_fp8(url: str, model: Path, **settings: object) -> AsyncIterator[LaneScene]:
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(log, model=model, engine_url=url, quantization="fp8_blocks")
    async with scene.serving(**settings):
        await scene.report(is_serving=True)
        yield scene


def rounded_logprobs(model: Path, tokens: list[int], *, first: int) -> list[float]:
    """As an engine should compute them: stock transformers, weights and inputs rounded here.

    Weights are read from the quantised file, the inputs of each of its layers become 8-bit floats
    by the definition of the format, 128 of them with one scale.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    small = load_file(in_blocks(model) / "model.safetensors")

    def round_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        groups = inputs[0].numpy().reshape(*inputs[0].shape[:-1], -1, GROUP)
        scales = abs(groups).max(axis=-1, keepdims=True) / 448
        values = (nearest(groups / scales) * scales).reshape(inputs[0].shape)
        return (torch.from_numpy(values).float(),)

    rounded = 0
    with torch.no_grad():
        for name, module in policy.named_modules():
            if f"{name}.weight_scale_inv" in small:
                values, scales = small[f"{name}.weight"], small[f"{name}.weight_scale_inv"]
                module.weight.copy_(dequantised(values, scales))
                module.register_forward_pre_hook(round_inputs)
                rounded += 1
        logits = policy(torch.tensor([tokens])).logits[0]
    assert rounded == 3 * 7
    rows = torch.log_softmax(logits[first - 1 : -1], -1)
    return [float(value) for value in rows.gather(1, torch.tensor(tokens[first:])[:, None])[:, 0]]


@pytest.mark.parametrize("path", ["fast", "durable"])
async def test_new_weights_arrive_in_8_bit_blocks_and_are_what_the_engine_computes_with(
    fp8_url: str, wide: Path, trained: Path, path: str
) -> None:
    """Before: version 0 of the trainer, with the blocks that the engine began with."""
    async with (
        serving_fp8(fp8_url, wide) as scene,
        publisher(in_blocks(trained), "send") as trainer,
    ):
        await scene.publish(in_blocks(wide), version=0)
        (start, base) = await scene.loaded(count=2, timeout_s=60)
        await scene.request(1, CONTEXT, max_tokens=24)
        await scene.finished(count=1, timeout_s=60)
        offers = await trainer.offer() if path == "fast" else ()
        await scene.publish(in_blocks(trained), version=1, fast_paths=offers)
        if path == "fast":
            await trainer.send()
            assert await trainer.result() == {"0": ""}
        *_, loaded = await scene.loaded(count=3, timeout_s=60)
        await scene.request(2, CONTEXT, max_tokens=24)
        first, second = await scene.finished(count=2, timeout_s=60)
    assert (start.path, base.path, base.version) == ("start", "start", 0)
    assert scene.events_named("engine_of_another_model") == []
    assert (loaded.path, loaded.version) == (path, 1)
    for record, model, version in ((first, wide, 0), (second, trained, 1)):
        tokens = unpack_ids(record.output)
        assert spans(record) == [(0, len(tokens), 1, version)]
        median = check_rounded(record, model, CONTEXT)
        found = unpack_floats(record.logprobs)
        full = logprobs(model, CONTEXT + tokens, first=len(CONTEXT))
        gaps = [abs(a - b) for a, b in zip(found, full, strict=True)]
        assert max(gaps) > 100 * median


def check_rounded(record: FinishedCompletion, model: Path, context: list[int]) -> float:
    """What an engine sampled has the log-probabilities of `rounded_logprobs`; their median gap."""
    assert record.error == ""
    tokens = unpack_ids(record.output)
    expected = rounded_logprobs(model, context + tokens, first=len(context))
    # An input on the border of two 8-bit floats may fall to either side by float32's rounding.
    found = unpack_floats(record.logprobs)
    differences = sorted(abs(a - b) for a, b in zip(found, expected, strict=True))
    median = differences[len(differences) // 2]
    assert median < 1e-4, differences
    assert differences[-1] < 0.1, differences
    return median


async def test_8_bit_blocks_come_by_relay_and_are_read_back(
    fp8_url: str, wide: Path, trained: Path, tmp_path: Path
) -> None:
    """Every parameter that can be compared is equal. Then the trainer broadcasts another file than
    it published, with one other 8-bit float."""
    sent = in_blocks(wide)
    sampled = sampled_parameters(sent / "model.safetensors", key="r-1.1", count=10_000)
    assert DOWN in {each.name for each in sampled}
    wrong = shutil.copytree(sent, tmp_path / "wrong")
    weights = load_file(sent / "model.safetensors")
    weights[DOWN].view(torch.uint8)[3, 5] ^= 0x10
    save_file(weights, wrong / "model.safetensors", metadata={"format": "pt"})
    async with serving_fp8(fp8_url, wide) as scene, publisher(wrong, "send") as trainer:
        address = (await scene.report(is_serving=True)).weights_address
        base = in_blocks(trained)
        of_base = sampled_parameters(base / "model.safetensors", key="r-1.1", count=10_000)
        await relay(base, [address], version=1)
        to_us = (RelayedLane(lane=0, epoch=1),)
        await scene.publish(base, version=1, relayed_to=to_us, sampled=of_base)
        await scene.loaded(count=2, timeout_s=60)
        assert scene.events_named("wrong_tensor") == []
        await scene.request(1, CONTEXT, max_tokens=24)
        await scene.finished(count=1, timeout_s=60)
        offers = await trainer.offer()
        await scene.publish(sent, version=2, fast_paths=offers, sampled=sampled, deadline_s=30.0)
        await trainer.send()
        await scene.loaded(count=3, timeout_s=60)
        await scene.request(2, CONTEXT, max_tokens=24)
        records, loaded = await scene.finished(count=2, timeout_s=60), await scene.loaded()
    assert [each.path for each in loaded] == ["start", "fast", "durable"]
    for record, model, version in zip(records, (trained, wide), (1, 2), strict=True):
        assert record.spans[0].version == version
        check_rounded(record, model, CONTEXT)
    assert [each["tensor"] for each in scene.events_named("wrong_tensor")] == [DOWN]
    assert scene.events_named("read_back_off") == []


async def test_8_bit_blocks_come_as_what_changed(
    fp8_url: str, wide: Path, trained: Path, tmp_path: Path
) -> None:
    """The second version has one other projection, so that its delta is small."""
    nudged = shutil.copytree(trained, trained.with_name("nudged"))
    weights = load_file(trained / "model.safetensors")
    weights[DOWN] += 0.05 * torch.randn_like(weights[DOWN])
    save_file(weights, nudged / "model.safetensors", metadata={"format": "pt"})
    store = DurableWeights(
        f"memory://{tmp_path.name}",
        run="r",
        drafts=tmp_path,
        telemetry=Telemetry(service="trainer", stream=io.StringIO()),
        is_stopping=lambda: False,
        deltas_max=4,
    )
    uploaded = []
    for version, model in ((1, trained), (2, nudged)):
        folder = store.local_folder(lineage=1, version=version)
        shutil.copytree(in_blocks(model), folder)
        uploaded.append(store.keep(read_weights_folder(folder)))
    assert [len(each.deltas) for each in uploaded] == [0, 1]
    assert uploaded[1].deltas[0].size_bytes < 0.2 * uploaded[1].size_bytes
    async with serving_fp8(fp8_url, wide, cache=tmp_path / "cache") as scene:
        for version, each in enumerate(uploaded, start=1):
            record = PublishedWeights(
                lineage=1,
                version=version,
                sha256=each.sha256,
                uri=each.uri,
                size_bytes=each.size_bytes,
                deadline_s=10.0,
                base_sha256=each.base_sha256 or None,
                deltas=each.deltas,
            )
            await scene.write(topics.PUBLISHED_WEIGHTS, 0, record)
            await scene.loaded(count=version + 1, timeout_s=60)
            await scene.request(version, CONTEXT, max_tokens=24)
            await scene.finished(count=version, timeout_s=60)
        first, second = await scene.finished()
    for completion, model, version in ((first, trained, 1), (second, nudged, 2)):
        assert completion.spans[0].version == version
        check_rounded(completion, model, CONTEXT)


async def test_an_engine_that_holds_weights_in_full_is_refused_by_name(
    base_engine_url: str, engine_model: Path
) -> None:
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(
        log, model=engine_model, engine_url=base_engine_url, quantization="fp8_blocks"
    )
    with pytest.raises(ExceptionGroup) as refused:
        async with scene.serving():
            await asyncio.sleep(30)
    rule = r"^model\.engine_quantization is fp8_blocks, .* --quantization fp8; that of http"
    assert refused.group_contains(EngineRefusedError, match=rule)


@pytest.mark.long
def test_a_run_trains_in_full_what_its_engine_samples_in_8_bit_blocks(
    kafka_bootstrap, new_run_id, tmp_path
):
    """The launcher writes the engine's model, the trainer publishes, the audit compares."""
    run_id = new_run_id()
    run = LaunchedRun(tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap})
    try:
        run.start(
            DIALOGUE,
            f"run={run_id}",
            "trainer.steps=3",
            "evaluation.tasks=0",
            "model.engine_quantization=fp8_blocks",
        )
        status = run.wait_for_end(within_s=800)
        assert run.left_behind() == []
    finally:
        run.close()
    assert status == 0, run.story()
    report = run.report(run_id)
    assert report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    # In full it would be below 1e-4.
    assert report["logprob_gap_max"] > 1e-3
    # The run is complete when its last version is published, served or not.
    assert re.search(r"lane 0 serves version 2 \(fast", run.output()), run.output()
