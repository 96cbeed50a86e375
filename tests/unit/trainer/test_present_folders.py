"""Nothing is written below the mount point of a folder that is no longer mounted."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.core.store_patience import AWAY_S_MAX
from forgemq_trainer.present_folders import PresentFolders
from tests.unit.trainer.bench import POLL_S, Bench, memory_bench
from tests.unit.trainer.scene import agent_samples, merge, scheduled_step


async def _bench(folder: Path, events: io.StringIO) -> Bench:
    """A run in whose blobs' folder the start of a run has made the run's."""
    bench = await memory_bench(folder, steps=2)
    telemetry = Telemetry(service="trainer", stream=events)
    bench = replace(bench, has_blob_folder=True, telemetry=telemetry)
    assert await BlobStore(bench.blobs, run="r").make_folder(makes_address=True)
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("which", ["trainer", "blobs"])
async def test_a_version_waits_for_a_folder_that_is_not_mounted(tmp_path: Path, which: str) -> None:
    """The folder goes behind step 0 and comes back; meanwhile its mount point stays empty."""
    events = io.StringIO()
    bench = await _bench(tmp_path, events)
    generator = np.random.default_rng(0)
    trees = [merge(agent_samples(generator), f"g-{number}") for number in range(4)]
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees[:2])])
    training = asyncio.create_task(bench.train(until=1))
    while 1 not in [each.version for each in await bench.published()]:  # noqa: ASYNC110 - a log
        await asyncio.sleep(POLL_S)
    mount = tmp_path / which
    mount.rename(tmp_path / "away")
    mount.mkdir()
    await bench.put_steps([scheduled_step(1, trees[2:], is_last=True)])
    while "folder_missing" not in events.getvalue():
        assert not training.done()
        await asyncio.sleep(POLL_S)
    assert list(mount.iterdir()) == []
    assert [step.step for step in await bench.trained()] == [0]
    mount.rmdir()
    (tmp_path / "away").rename(mount)
    await training
    assert [step.step for step in await bench.trained()] == [0, 1]
    assert (tmp_path / "blobs/weights/r/1.2/model.safetensors").exists()
    assert (tmp_path / "trainer/checkpoints/step-00000001").exists()


@pytest.mark.parametrize(("which", "error"), [("trainer", FileNotFoundError), ("blobs", BlobError)])
async def test_a_folder_that_stays_away_ends_the_wait_with_its_name(
    tmp_path: Path, which: str, error: type[Exception]
) -> None:
    events = io.StringIO()
    bench = await _bench(tmp_path, events)
    bench.folder.mkdir()
    (bench.folder / ".lock").touch()
    blobs = BlobStore(bench.blobs, run="r", has_folder=True)
    is_stopping = False
    folders = PresentFolders(
        blobs, bench.folder, telemetry=bench.telemetry, is_stopping=lambda: is_stopping
    )
    await folders.wait()
    (tmp_path / which).rename(tmp_path / "away")
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(error, match=f"{tmp_path / which}.* mounted"):
        await folders.wait()
    assert asyncio.get_running_loop().time() - began_s >= AWAY_S_MAX
    told = len(events.getvalue().splitlines())
    is_stopping = True
    with pytest.raises(error):
        await folders.wait()
    assert len(events.getvalue().splitlines()) == told
