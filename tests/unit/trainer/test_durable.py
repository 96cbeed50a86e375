"""Where published weights lie, and that an inference process finds them there."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.torch import load_file

from forgemq_contracts.trees import MergedTree
from forgemq_inference.durable import DurableCopies
from forgemq_trainer.storage.durable import DurableWeights
from tests.unit.trainer.bench import memory_bench
from tests.unit.trainer.scene import agent_samples, merge, scheduled_step


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """fsspec's object store in memory."""
    root = f"/durable-{tmp_path.name}"
    yield f"memory:/{root}"
    store = fsspec.filesystem("memory")
    if store.exists(root):
        store.rm(root, recursive=True)


def _trees(count: int) -> list[MergedTree]:
    generator = np.random.default_rng(0)
    return [merge(agent_samples(generator), f"g-{number}") for number in range(count)]


@pytest.mark.parametrize("scheme", ["", "file://"])
async def test_weights_lie_beside_the_blobs_under_a_plain_path(tmp_path: Path, scheme: str) -> None:
    """An engine mounts the blobs, not the trainer's folder; SGLang does not read `file://`."""
    bench = replace(await memory_bench(tmp_path), remote=f"{scheme}{tmp_path}/shared")
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)
    _, published = await bench.published()
    assert published.uri == str(tmp_path / "shared/weights/r/1.1")
    folder = await DurableCopies(tmp_path / "cache").folder(published)
    assert folder == tmp_path / "shared/weights/r/1.1"
    assert {path.name for path in bench.folder.iterdir()} == {".lock", "checkpoints"}


async def test_weights_in_an_object_store_reach_an_inference_process(
    tmp_path: Path, remote: str
) -> None:
    bench = replace(await memory_bench(tmp_path), remote=remote)
    trees = _trees(2)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(0, trees)])
    await bench.train(until=0)
    _, published = await bench.published()
    assert published.uri == f"{remote}/weights/r/1.1"
    copies = DurableCopies(tmp_path / "cache")
    folder = await copies.folder(published)
    saved = load_file(folder / "model.safetensors")
    assert [spec.name for spec in await copies.tensors(published)] == sorted(saved)
    assert (folder / "tokenizer_config.json").read_text() == '{"model_max_length": 512}'
    await bench.put_steps([scheduled_step(1, trees)])
    await bench.train(until=1)  # From the checkpoint, as a pod on another node starts.
    *_, again, _ = await bench.published()
    assert (again.uri, again.sha256) == (f"{remote}/weights/r/2.1", published.sha256)


@pytest.mark.parametrize("is_remote", [False, True])
def test_old_versions_go_by_number_and_the_checkpoints_stays(
    tmp_path: Path, remote: str, *, is_remote: bool
) -> None:
    blobs = remote if is_remote else str(tmp_path)
    weights = DurableWeights(blobs, run="r", drafts=tmp_path / "drafts")
    store, root = fsspec.core.url_to_fs(f"{blobs}/weights/r")
    names = ["1.8", "1.9", "1.10", "1.11", "2.2", "2.10"]
    for name in names:
        lineage, _, version = name.partition(".")
        folder = weights.local_folder(lineage=int(lineage), version=int(version))
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(name)
        store.pipe_file(f"{root}/{name}/model.safetensors", name.encode())
    checkpointed = weights.local_folder(lineage=1, version=8)
    weights.remove_older(kept=3, besides=frozenset({checkpointed}))
    left = {Path(path).name for path in store.ls(root, detail=False)}
    assert left == {"2.10", "2.2", "1.11", "1.8"}
    assert {path.name for path in checkpointed.parent.iterdir()} == left
