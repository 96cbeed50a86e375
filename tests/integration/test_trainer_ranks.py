"""Two ranks started by torchrun, on the real broker: steps become weights, across a restart."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.ranks_bench import announced_bench, work
from tests.unit.trainer.bench import Bench, memory_bench

pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]
ALONE = ("forgemq_trainer",)
TWO_RANKS = ("forgemq_trainer.ranks.torchrun", "2")


async def _start(
    bench: Bench, bootstrap: str, *module: str, device: str = "cpu"
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *module,
        env={
            **os.environ,
            "FORGEMQ_TRAINER_DEVICE": device,
            "FORGEMQ_RUN": bench.configuration.run,
            "FORGEMQ_KAFKA": bootstrap,
            "FORGEMQ_TRAINER_FOLDER": str(bench.folder),
            "OMP_NUM_THREADS": "1",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def _life(bench: Bench, bootstrap: str, *, until: int) -> None:
    """Run both ranks until this step is trained and published, then end them by SIGTERM."""
    process = await _start(bench, bootstrap, *TWO_RANKS)
    output = asyncio.create_task(process.communicate())
    while until + 1 not in [weights.version for weights in await bench.published()]:
        if output.done():
            pytest.fail(f"the ranks ended:\n{output.result()[0].decode()}")
        await asyncio.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    text = (await asyncio.wait_for(output, 100))[0].decode()
    assert '"following"' in text, text
    assert text.count('"ended"') == 1, text
    assert process.returncode == 0, text


@pytest.fixture
async def bench(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> AsyncIterator[Bench]:
    async with announced_bench(new_run_id(), kafka_bootstrap, tmp_path, world_size=2) as opened:
        yield opened


async def test_two_ranks_train_what_one_does_and_continue_after_a_restart(
    bench: Bench, kafka_bootstrap: str, tmp_path: Path
) -> None:
    trees, steps = work(3)
    await bench.put_trees(trees)
    await bench.put_steps(steps[:2])
    await _life(bench, kafka_bootstrap, until=1)
    await bench.put_steps(steps[2:])
    await _life(bench, kafka_bootstrap, until=2)
    trained = await bench.trained()
    assert [(step.step, step.lineage) for step in trained] == [(0, 1), (1, 1), (2, 2)]

    (tmp_path / "alone").mkdir()
    one_rank = await memory_bench(tmp_path / "alone")
    await one_rank.put_trees(trees)
    await one_rank.put_steps(steps)
    await one_rank.train(until=2)
    for two, one in zip(trained, await one_rank.trained(), strict=True):
        assert two.metrics.loss == pytest.approx(one.metrics.loss, rel=1e-3)
        assert two.metrics.grad_norm == pytest.approx(one.metrics.grad_norm, rel=1e-3)
        assert two.metrics.loss_tokens == one.metrics.loss_tokens
    found = load_file(Path((await bench.published())[-1].uri) / "model.safetensors")
    wanted = load_file(Path((await one_rank.published())[-1].uri) / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm()

    alone, one_gpu = await asyncio.gather(
        _refusal(await _start(bench, kafka_bootstrap, *ALONE)),
        _refusal(await _start(bench, kafka_bootstrap, *TWO_RANKS, device="cuda:0")),
    )
    assert "trainer.world_size is 2" in alone
    assert "WORLD_SIZE=1" in alone
    assert "FORGEMQ_TRAINER_DEVICE=cuda:0 gives 2 ranks one GPU" in one_gpu


async def _refusal(process: asyncio.subprocess.Process) -> str:
    """Wait for a trainer that refuses its settings; returns its error."""
    text = (await asyncio.wait_for(process.communicate(), 150))[0].decode()
    assert process.returncode == 2, text
    return text
