"""New weights into an SGLang server on a GPU: by each way they are those of the durable copy.

SGLang hashes parameters on a GPU in a way of its own, so the read-back of the product is off there.
Here the engine's own checksums after a fast path are compared with those after the durable copy.
"""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.weights import RelayedLane, Rendezvous
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_trainer.samples import sampled_parameters
from tests.engine_fixture import ENGINE_MODEL, reset_engine, started_engine
from tests.gpu import in_full
from tests.integration.test_weights_engine import logprobs, perturbed, publisher, spans
from tests.lane_scene import LaneScene, create_topics
from tests.relay_sender import relay

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

CONTEXT = [10, 20, 30, 40, 50, 60]
IN_FULL = (*in_full.FLAGS, "--mem-fraction-static", "0.2")
"""So that log-probabilities can be compared with float32 on a CPU; the memory is the trainer's
too."""
GAP_MAX = 2e-3
"""Nats; sums in another order than on a CPU."""


class GpuEngine(NamedTuple):
    url: str
    gpus: int


@pytest.fixture(scope="module", params=[1, 2], ids=["one GPU", "two GPUs"])
def gpu_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuEngine]:
    """On the last GPUs: NCCL sends from the first one, and refuses two ranks on one GPU."""
    gpus: int = request.param
    first = torch.cuda.device_count() - gpus
    if first < 0:
        pytest.skip(f"an engine of {gpus} GPUs needs {gpus}")
    options = EngineOptions(
        has_gpu=True,
        tensor_parallel=gpus,
        gpu_first=first,
        extra=IN_FULL,
        context_tokens_max=372,
    )
    folder, environment = tmp_path_factory.mktemp("engine"), in_full.environment()
    with started_engine(folder, options, environment=environment) as url:
        yield GpuEngine(url, gpus)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(ENGINE_MODEL, tmp_path_factory.mktemp("trained"), seed=1)


def checksums(url: str) -> list[dict[str, str]]:
    """Of every parameter in each of the engine's processes, as the engine computes them."""
    request = urllib.request.Request(
        f"{url}/weights_checker",
        data=json.dumps({"action": "checksum", "selector": "target"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        ranks = json.load(response)["ranks"]
    return [dict(rank["checksums"]) for rank in ranks]


@pytest.mark.parametrize("way", ["gloo", "nccl", "relay"])
async def test_weights_by_each_way_are_those_of_the_durable_copy(
    gpu_engine: GpuEngine, trained: Path, way: str
) -> None:
    """Versions: 1 from the durable copy, 2 the base model again, 3 the same weights as 1."""
    url, gpus = gpu_engine
    if way == "nccl" and torch.cuda.device_count() == gpus:
        pytest.skip("NCCL refuses a trainer and an engine on one GPU")
    reset_engine(url, ENGINE_MODEL)
    sampled = sampled_parameters(trained / "model.safetensors", key="r-1.3")
    log = MemoryLog(run="r")
    await create_topics(log)
    scene = LaneScene(log, model=ENGINE_MODEL, engine_url=url)
    backend = "nccl" if way == "nccl" else "gloo"
    async with scene.serving(), publisher(trained, "send", ranks=gpus, backend=backend) as trainer:
        address = (await scene.report(is_serving=True)).weights_address
        await scene.publish(trained, version=1)
        await scene.loaded(count=2, timeout_s=60)
        expected = checksums(url)
        assert len(expected) == gpus
        await scene.publish(ENGINE_MODEL, version=2)
        await scene.loaded(count=3, timeout_s=60)
        assert checksums(url) != expected
        offers: tuple[Rendezvous, ...] = ()
        relayed_to: tuple[RelayedLane, ...] = ()
        if way == "relay":
            await relay(trained, [address], version=3)
            relayed_to = (RelayedLane(lane=0, epoch=1),)
        else:
            offers = await trainer.offer()
        await scene.publish(
            trained,
            version=3,
            fast_paths=offers,
            relayed_to=relayed_to,
            sampled=sampled,
            deadline_s=60.0,
        )
        if offers:
            await trainer.send()
            assert await trainer.result() == {"0": ""}
        *_, loaded = await scene.loaded(count=4, timeout_s=120)
        found = checksums(url)
        await scene.request(1, CONTEXT, max_tokens=20)
        (record,) = await scene.finished(count=1, timeout_s=60)
    assert (loaded.version, loaded.path) == (3, "fast")
    assert found == expected
    assert [each["reason"] for each in scene.events_named("read_back_off")] == [
        "the engine is on a GPU"
    ]
    output = list(unpack_ids(record.output))
    assert spans(record) == [(0, len(output), 1, 3)]
    wanted = logprobs(trained, [*CONTEXT, *output], first=len(CONTEXT))
    assert list(unpack_floats(record.logprobs)) == pytest.approx(wanted, abs=GAP_MAX)
