"""Where published weights lie, and that an inference process finds them there."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors.torch import load_file

from forgemq_bus.errors import BlobError
from forgemq_contracts.trees import MergedTree
from forgemq_contracts.weights import PublishedWeights
from forgemq_inference.durable import DurableCopies, DurableCopyError
from forgemq_settings.environment import SettingsError
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.storage.durable import DurableWeights
from forgemq_trainer.storage.weights import WeightsFolder, read_weights_folder
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


def _durable(
    blobs: str,
    drafts: Path,
    *,
    deltas_max: int = 0,
    events: io.StringIO | None = None,
    is_stopping: bool = False,
) -> DurableWeights:
    return DurableWeights(
        blobs,
        run="r",
        drafts=drafts,
        telemetry=Telemetry(service="trainer", stream=events or io.StringIO()),
        is_stopping=lambda: is_stopping,
        deltas_max=deltas_max,
    )


@contextmanager
def _failing(errors: list[OSError]) -> Iterator[list[OSError]]:
    """The store in memory fails uploads with these errors, one after the other; yields the rest."""
    store, left = fsspec.filesystem("memory"), list(errors)
    put_file = store.put_file

    def put(*arguments: str) -> None:
        if left:
            raise left.pop(0)
        put_file(*arguments)

    store.put_file = put
    try:
        yield left
    finally:
        del store.put_file


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
    weights = _durable(blobs, tmp_path / "drafts")
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


async def test_a_trainer_uploads_what_its_steps_change(tmp_path: Path, remote: str) -> None:
    bench = replace(
        await memory_bench(tmp_path),
        remote=remote,
        environ={"FORGEMQ_TRAINER_DELTAS_MAX": "1"},
    )
    trees = _trees(6)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(n, trees[2 * n : 2 * n + 2]) for n in range(3)])
    await bench.train(until=2)
    _, *versions = await bench.published()
    kinds = [(each.kind, len(each.deltas), each.uri.rpartition("/")[2]) for each in versions]
    assert kinds == [("full", 0, "1.1"), ("delta", 1, "1.1"), ("full", 0, "1.3")]
    folder = await DurableCopies(tmp_path / "cache").folder(versions[1])
    trained = bench.folder / "weights/1.2/model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == trained.read_bytes()
    assert versions[1].deltas[0].changed_share > 0.9  # In float32 a step changes nearly all.


def _version(weights: DurableWeights, number: int, values: np.ndarray) -> WeightsFolder:
    """A version whose one tensor has these values, uploaded."""
    folder = weights.local_folder(lineage=1, version=number)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": values}, folder / "model.safetensors")
    return weights.keep(read_weights_folder(folder))


def _published(weights: WeightsFolder, version: int) -> PublishedWeights:
    return PublishedWeights(
        lineage=1,
        version=version,
        sha256=weights.sha256,
        uri=weights.uri,
        size_bytes=weights.size_bytes,
        kind="delta" if weights.deltas else "full",
        base_sha256=weights.base_sha256 or None,
        deltas=weights.deltas,
    )


def _steps(count: int, *, size: int = 20_000) -> Iterator[np.ndarray]:
    """Values of which each step changes one in a hundred a little."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal(size, dtype=np.float32)
    for _ in range(count):
        yield values.copy()
        values.view(np.int32)[generator.random(size) < 0.01] += 1


def _names(uploaded: WeightsFolder) -> list[str]:
    return [uploaded.uri.rpartition("/")[2], *(each.uri.split("/")[-2] for each in uploaded.deltas)]


async def test_a_chain_of_deltas_makes_the_bytes_of_each_version(
    tmp_path: Path, remote: str
) -> None:
    weights = _durable(remote, tmp_path / "drafts", deltas_max=2)
    follows = DurableCopies(tmp_path / "follows")
    store = fsspec.filesystem("memory")
    uploads = []
    for number, values in enumerate(_steps(5)):
        uploaded = _version(weights, number, values)
        uploads.append(_names(uploaded))
        published = _published(uploaded, number)
        whole = (uploaded.folder / "model.safetensors").read_bytes()
        late = DurableCopies(tmp_path / f"late-{number}")
        for copies in (follows, late):
            folder = await copies.folder(published)
            assert (folder / "model.safetensors").read_bytes() == whole
            assert (folder / "config.json").read_text() == "{}"
        assert [spec.name for spec in await late.tensors(published)] == ["a"]
        for delta in uploaded.deltas:
            assert delta.size_bytes == store.size(delta.uri) < uploaded.size_bytes / 40
            assert 0.005 < delta.changed_share < 0.015
    assert uploads == [["1.0"], ["1.0", "1.1"], ["1.0", "1.1", "1.2"], ["1.3"], ["1.3", "1.4"]]


@pytest.mark.parametrize("left", [b"", b"half", None])
async def test_a_delta_of_a_damaged_copy_in_the_cache_is_applied_to_a_new_one(
    tmp_path: Path, remote: str, left: bytes | None
) -> None:
    """As a machine that lost its power may leave it; the second attempt has to succeed."""
    weights = _durable(remote, tmp_path / "drafts", deltas_max=8)
    first, second = (_version(weights, number, values) for number, values in enumerate(_steps(2)))
    cache = tmp_path / "cache"
    held = await DurableCopies(cache).folder(_published(first, 0)) / "model.safetensors"
    if left is None:
        held.unlink()
    else:
        held.write_bytes(left)
    copies = DurableCopies(cache)
    with suppress(DurableCopyError):
        await copies.folder(_published(second, 1))
    folder = await copies.folder(_published(second, 1))
    whole = (second.folder / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == whole


async def test_the_two_newest_stay_of_copies_that_were_made_of_one_another(
    tmp_path: Path, remote: str
) -> None:
    """A copy that is made of another one has its time, by which the oldest are found."""
    weights = _durable(remote, tmp_path / "drafts", deltas_max=8)
    cache = tmp_path / "cache"
    copies = DurableCopies(cache)
    versions = [_version(weights, number, values) for number, values in enumerate(_steps(8))]
    for number, uploaded in enumerate(versions[:7]):
        folder = await copies.folder(_published(uploaded, number))
        newest = {each.sha256 for each in versions[max(0, number - 1) : number + 1]}
        assert {each.name for each in cache.iterdir()} == newest
        assert folder.name == uploaded.sha256
    # An older one is wanted again, as after a restart of the trainer: then it is the newest.
    again = await copies.folder(_published(versions[5], 5))
    await copies.folder(_published(versions[7], 7))
    assert again.exists()


async def test_a_step_that_changed_nothing_is_a_delta_too(tmp_path: Path, remote: str) -> None:
    weights = _durable(remote, tmp_path / "drafts", deltas_max=2)
    values = next(_steps(1))
    _version(weights, 0, values)
    unchanged = _version(weights, 1, values)
    assert (unchanged.deltas[0].changed_share, unchanged.base_sha256) == (0.0, unchanged.sha256)
    folder = await DurableCopies(tmp_path / "cache").folder(_published(unchanged, 1))
    assert read_weights_folder(folder).sha256 == unchanged.sha256


async def test_who_has_the_version_before_downloads_nothing_but_the_delta(
    tmp_path: Path, remote: str
) -> None:
    weights = _durable(remote, tmp_path / "drafts", deltas_max=8)
    copies = DurableCopies(tmp_path / "cache")
    first, second, third = (
        _version(weights, number, values) for number, values in enumerate(_steps(3))
    )
    await copies.folder(_published(second, 1))
    store = fsspec.filesystem("memory")
    store.rm(first.uri, recursive=True)
    store.rm(second.deltas[0].uri)
    folder = await copies.folder(_published(third, 2))
    assert (folder / "model.safetensors").read_bytes() == (
        third.folder / "model.safetensors"
    ).read_bytes()


async def test_a_damaged_copy_in_the_cache_is_downloaded_again(tmp_path: Path, remote: str) -> None:
    weights = _durable(remote, tmp_path / "drafts", deltas_max=8)
    cache = tmp_path / "cache"
    first, second = (_version(weights, number, values) for number, values in enumerate(_steps(2)))
    folder = await DurableCopies(cache).folder(_published(first, 0))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    copies = DurableCopies(cache)
    with pytest.raises(DurableCopyError, match=r"weights\.delta: tensor a"):
        await copies.folder(_published(second, 1))
    folder = await copies.folder(_published(second, 1))
    assert (folder / "model.safetensors").read_bytes() == (
        second.folder / "model.safetensors"
    ).read_bytes()


def test_a_chain_that_is_larger_than_a_full_copy_ends(tmp_path: Path, remote: str) -> None:
    """All bits of one value in four change: the third delta would be the chain's last byte."""
    weights = _durable(remote, tmp_path / "drafts", deltas_max=100)
    generator = np.random.default_rng(0)
    uploads = []
    for number in range(6):
        values = np.zeros(10_000, dtype=np.float32)
        bits = generator.integers(0, 2**32, 2_500, dtype=np.uint32)
        values.view(np.uint32)[:2_500] = bits & 0x7F7F_FFFF
        uploads.append(_names(_version(weights, number, values)))
    assert uploads[:5] == [
        ["1.0"],
        ["1.0", "1.1"],
        ["1.0", "1.1", "1.2"],
        ["1.0", "1.1", "1.2", "1.3"],
        ["1.4"],
    ]


def test_what_a_kept_version_is_made_of_stays(tmp_path: Path, remote: str) -> None:
    weights = _durable(remote, tmp_path / "drafts", deltas_max=3)
    store, root = fsspec.core.url_to_fs(f"{remote}/weights/r")

    def left() -> set[str]:
        return {Path(path).name for path in store.ls(root, detail=False)}

    versions = _steps(6)
    for number in range(4):
        _version(weights, number, next(versions))
        weights.remove_older(kept=1, besides=frozenset())
    assert left() == {"1.0", "1.1", "1.2", "1.3"}
    assert {path.name for path in (tmp_path / "drafts").iterdir()} == {"1.3"}
    _version(weights, 4, next(versions))
    weights.remove_older(kept=1, besides=frozenset())
    assert left() == {"1.4"}


def test_an_upload_that_fails_is_followed_by_a_full_copy(tmp_path: Path, remote: str) -> None:
    weights = _durable(remote, tmp_path / "drafts", deltas_max=3, is_stopping=True)
    versions = _steps(3)
    _version(weights, 0, next(versions))
    with _failing([OSError("no space")]), pytest.raises(BlobError, match=r"1\.1/.*: no space"):
        _version(weights, 1, next(versions))
    assert _names(_version(weights, 2, next(versions))) == ["1.2"]


@pytest.mark.slow
def test_a_delta_is_uploaded_once_its_store_is_back(tmp_path: Path, remote: str) -> None:
    events = io.StringIO()
    weights = _durable(remote, tmp_path / "drafts", deltas_max=3, events=events)
    versions = _steps(2)
    _version(weights, 0, next(versions))
    with _failing([OSError("gone"), OSError("still gone")]):
        assert _names(_version(weights, 1, next(versions))) == ["1.0", "1.1"]
    told = [json.loads(line) for line in events.getvalue().splitlines()]
    path = f"/durable-{tmp_path.name}/weights/r/1.1/weights.delta"
    assert [(each["event"], each["error"]) for each in told] == [
        ("object_store_away", f"cannot upload {path}: gone"),
        ("object_store_away", f"cannot upload {path}: still gone"),
    ]


@pytest.mark.parametrize("refusal", [PermissionError("not yours"), FileNotFoundError("no bucket")])
def test_a_refusal_of_the_store_is_not_waited_for(
    tmp_path: Path, remote: str, refusal: OSError
) -> None:
    weights = _durable(remote, tmp_path / "drafts")
    with _failing([refusal, OSError("asked again")]) as left:
        with pytest.raises(BlobError, match=f"^cannot upload .*: {refusal}$"):
            _version(weights, 0, next(_steps(1)))
        assert [str(each) for each in left] == ["asked again"]


@pytest.mark.slow
async def test_a_trainer_whose_store_is_away_trains_on_in_the_same_life(
    tmp_path: Path, remote: str
) -> None:
    bench = replace(await memory_bench(tmp_path), remote=remote)
    trees = _trees(4)
    await bench.put_trees(trees)
    await bench.put_steps([scheduled_step(n, trees[2 * n : 2 * n + 2]) for n in range(2)])
    with _failing([OSError("gone"), OSError("still gone")]) as left:
        await bench.train(until=1)
    assert left == []
    assert [(each.lineage, each.step) for each in await bench.trained()] == [(1, 0), (1, 1)]
    published = await bench.published()
    assert [(each.lineage, each.version) for each in published] == [(1, 0), (1, 1), (1, 2)]


def test_deltas_of_a_local_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="FORGEMQ_TRAINER_DELTAS_MAX: 8, but the blobs are in"):
        _durable(str(tmp_path), tmp_path, deltas_max=8)
