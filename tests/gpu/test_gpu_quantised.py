"""An engine on a GPU that holds 8-bit weights in blocks: SGLang's own kernels compute with them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from wide_demo import wide_demo

from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.weights import Rendezvous
from forgemq_sglang_cpu.options import EngineOptions
from tests.engine_fixture import started_engine
from tests.gpu.test_gpu_weights import checksums
from tests.integration.test_quantised_engine import (
    CONTEXT,
    in_blocks,
    rounded_logprobs,
    serving_fp8,
)
from tests.integration.test_weights_engine import perturbed, publisher

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

GAP_MEAN_MAX = 0.05
"""Nats, against float32 with weights and inputs rounded as the format says: the engine computes in
bfloat16."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, all of which has whole blocks."""
    return wide_demo(tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(scope="module")
def fp8_engine(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = EngineOptions(
        has_gpu=True,
        gpu_first=torch.cuda.device_count() - 1,
        context_tokens_max=372,
        # Blackwell's default attention has no heads as small as the demo's.
        extra=("--mem-fraction-static", "0.2", "--attention-backend", "triton"),
    )
    with started_engine(tmp_path_factory.mktemp("engine"), options, model=in_blocks(wide)) as url:
        yield url


async def test_8_bit_blocks_come_alike_by_both_ways_and_are_what_the_engine_computes_with(
    fp8_engine: str, wide: Path, tmp_path: Path
) -> None:
    """Versions: 0 and 1 from the durable copy, 2 is version 0 again, 3 by broadcast is 1 again."""
    trained = perturbed(wide, tmp_path / "trained", seed=4)
    small, base = in_blocks(trained), in_blocks(wide)
    found: list[list[dict[str, str]]] = []
    async with (
        serving_fp8(fp8_engine, wide) as scene,
        publisher(small, "send") as trainer,
    ):
        for version, folder in enumerate((base, small, base, small)):
            offers: tuple[Rendezvous, ...] = await trainer.offer() if version == 3 else ()
            await scene.publish(folder, version=version, fast_paths=offers, deadline_s=60.0)
            if offers:
                await trainer.send()
                assert await trainer.result() == {"0": ""}
            *_, loaded = await scene.loaded(count=2 + version, timeout_s=120)
            found.append(checksums(fp8_engine))
        await scene.request(1, CONTEXT, max_tokens=24)
        (record,) = await scene.finished(count=1, timeout_s=60)
    assert (loaded.version, loaded.path) == (3, "fast")
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] != found[1]
    output = list(unpack_ids(record.output))
    wanted = rounded_logprobs(trained, CONTEXT + output, first=len(CONTEXT))
    gaps = [abs(a - b) for a, b in zip(unpack_floats(record.logprobs), wanted, strict=True)]
    assert sum(gaps) / len(gaps) < GAP_MEAN_MAX
